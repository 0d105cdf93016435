"""From data files to batches of prompts.

``files`` reads rows, ``tasks`` makes rows, ``tokenizer`` loads or makes a
tokenizer, ``template`` turns a prompt into token ids, ``prompts`` turns rows into
a checked data set and ``stream`` draws batches from it.
"""

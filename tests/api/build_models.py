"""Models of transformers, small enough to compile in seconds."""

import torch
import transformers

from jaxrl_hybrid.data.tokenizer import symbol_tokenizer

WORDS = [f"w{i}" for i in range(90)] + ["user", "assistant", "."]
TEMPLATE = (
  "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}"
  "{% if add_generation_prompt %}assistant {% endif %}"
)
# The shape of SmolLM2, but small: 9 query and 3 key heads, tied.
SHAPE = dict(
  vocab_size=99,
  hidden_size=72,
  intermediate_size=96,
  num_hidden_layers=2,
  num_attention_heads=9,
  num_key_value_heads=3,
  max_position_embeddings=64,
  initializer_range=0.3,
  eos_token_id=2,
  pad_token_id=0,
)
MESH = {"tp": 4, "dp": 2}
SMALL = {
  "data": {"train_batch_size": 8, "max_prompt_length": 16, "max_response_length": 8},
  "actor.ppo_micro_batch_size_per_device": 4,
  "actor.optim.lr": 1e-2,
  "critic.optim.lr": 1e-2,
}
PROMPTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10 w11"]


def make_tokenizer(words=WORDS):
  tokenizer = symbol_tokenizer(words)
  tokenizer.chat_template = TEMPLATE
  return tokenizer


def torch_model(auto, tokenizer=None, directory=None, **changes):
  config = transformers.AutoConfig.for_model(
    "llama", **SHAPE | dict(tie_word_embeddings=True) | changes
  )
  torch.manual_seed(0)
  model = auto.from_config(config, dtype=torch.float32).eval()
  if directory:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
  return model

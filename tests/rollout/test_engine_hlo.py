"""What the decode loop moves between devices."""

import sys
from pathlib import Path

import jax.numpy as jnp

sys.path.append(str(Path(__file__).parents[1] / "parallel"))

import hlo

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling

SPEC = ModelSpec("llama", 4096, 32, 64, 1, 4, 4, 8, 64, tie_word_embeddings=True)


def test_no_token_gathers_the_head():
  mesh = mesh_lib.train_mesh((1, 2, 2))
  train = weights_lib.train_layout(SPEC, mesh, sequence_parallel=False)
  source = weights_lib.WeightLayout(SPEC, train, jnp.dtype("float32"))
  target = weights_lib.generation_layout(SPEC, mesh_lib.generation_mesh(mesh, (1, 2)))
  weights = HybridEngine(source, target).copy(source.abstract_weights())
  engine = Engine(
    Decoder(SPEC, jnp.dtype("float32"), "xla", target.constrain),
    target,
    eos_ids=(2,),
    max_rows=4,
    seed=0,
  )
  lowered = engine.programs.lower_decode(weights, 4, 16, Sampling(1.0))
  found = hlo.collectives(lowered.compile().as_text())
  logits = 2 * SPEC.vocab_size * 4  # of the two rows on a device
  head = SPEC.vocab_size * SPEC.hidden_size * 4
  largest = max(x.bytes_out for x in found if x.kind == "all-gather")
  assert logits == largest < head

"""Seeds and streams of random bits.

Random bits come from Philox4x32-10, a pure function of (seed, stream, logical element index): nothing is stored and no state advances, so
that any element's bits can be computed independently, on any device. Only the seed is drawn.

The behaviour of layers follows from that, and matters when you measure noise:

- Each call of a layer draws one seed for its inputs and gradients from torch's own generator, as dropout does. So a model with points and
  one without draw different data orders afterwards: give the data loader its own generator.
- A weight's seed follows from its values and from a seed drawn when the layer was created, converted or deep-copied. Until a step changes
  the weight, it is rounded identically at every call. `Quantizer(…, redraw="call")` draws at every call instead, for example to see the
  spread of a weight's rounding; each rank of a distributed run then draws its own noise.
- Gradients use the seed of the call that they belong to: a second backward pass through the same graph repeats the first. Call the layer
  again for fresh noise.
- Activation checkpointing calls the layer again and restores torch's generator, except with `preserve_rng_state=False`: then
  `act_bwd="same"` is no longer the same rounding.

Example:
    >>> import qsim
    >>> qsim.random.random_bits(4, 6, seed=1)
    tensor([ 1, 56,  3, 57])
    >>> qsim.random.random_bits(2, 6, seed=1, offset=2)
    tensor([ 3, 57])
"""

from qsim.random.noise import Noise
from qsim.random.philox import philox4x32, random_bits
from qsim.random.seeds import shared_seed
from qsim.random.streams import stream

__all__ = ["Noise", "philox4x32", "random_bits", "shared_seed", "stream"]

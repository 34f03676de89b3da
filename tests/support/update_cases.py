"""Arguments of the update operator: the same cases for the reference and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import qsim
from qsim.optim import settings
from qsim_kernels.numbers.updates import AdamAlgorithm, Algorithm, Roundings, SGDAlgorithm, Step, read_roundings
from support.covering import dealt

BETAS = (0.75, 0.875)
ALGORITHMS: dict[str, Algorithm] = {
    "AdamW": AdamAlgorithm(*BETAS, 1e-2, 0.1, decoupled=True, maximize=True, amsgrad=False),
    "Adam": AdamAlgorithm(*BETAS, 1e-2, 0.1, decoupled=False, maximize=False, amsgrad=False),
    "AMSGrad": AdamAlgorithm(*BETAS, 1e-2, 0.0, decoupled=False, maximize=False, amsgrad=True),
    "SGD": SGDAlgorithm(0.9, 0.25, 0.1, decoupled=False, maximize=False, nesterov=False),
    "Nesterov": SGDAlgorithm(0.75, 0.0, 0.1, decoupled=True, maximize=False, nesterov=True),
    "plain": SGDAlgorithm(0.0, 0.0, 0.0, decoupled=False, maximize=True, nesterov=False),
}


class UpdateCase(NamedTuple):
    """An update: `qsim.optim`'s options, dtypes, sizes, and the positions of shards in the whole."""

    algorithm: str
    dtype: torch.dtype = torch.bfloat16
    weight: str | None = None
    update: str = "stochastic"
    state: str | None = None
    state_rounding: str = "nearest"
    arithmetic: str = "float32"
    grad: torch.dtype = torch.float32
    places: tuple[int, ...] | None = None
    scale: float | None = None
    sizes: tuple[tuple[int, ...], ...] = ((2061,), (3, 5))
    steps: int = 2

    def __str__(self) -> str:
        """The options that differ from the defaults."""
        options = zip(self._fields[1:], self[1:], strict=True)
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in options if value != self._field_defaults[name])])

    @property
    def setting(self) -> settings.Setting:
        return settings.setting(self.weight, self.update, self.state, self.state_rounding, self.arithmetic, "format", self.dtype)

    @property
    def roundings(self) -> Roundings:
        return read_roundings(*self.setting.roundings)


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SMALL = ((13,), (3, 5))
# Two shards: one row after another, and parts of rows.
PLACES = (3, 0, 0, 16, 5, 9)

CASES = [
    # Every algorithm in float32's arithmetic and in the format's.
    *[UpdateCase(name) for name in ALGORITHMS],
    *[UpdateCase(name, arithmetic="format", sizes=SMALL) for name in ALGORITHMS],
    # Every rounding, for every kind of parameter.
    *[
        UpdateCase(name, dtype, weight, update, sizes=SMALL)
        for number, (dtype, weight) in enumerate(((FP16, None), (FP32, None), (BF16, "e4m3"), (FP32, "e4m3"), (FP16, "e5m2")))
        for turn, update in enumerate(("nearest", "kahan", "stochastic"), number)
        for name in dealt(("AdamW", "Nesterov"), turn, 2)
    ],
    *[UpdateCase("AdamW", BF16, None, update, sizes=SMALL) for update in ("nearest", "kahan", "Stochastic(bits=5, correction=True)")],
    *[UpdateCase("Adam", BF16, "e4m3", update, arithmetic="format", sizes=SMALL) for update in ("nearest", "kahan")],
    UpdateCase("AMSGrad", FP16, "e5m2", "kahan", arithmetic="format", sizes=SMALL),
    UpdateCase("AdamW", BF16, None, "Kahan('stochastic')", steps=1),
    UpdateCase("SGD", FP32, "e4m3", "Kahan(Stochastic(bits=7))", sizes=SMALL, places=PLACES),
    UpdateCase("Adam", FP16, "e5m2", "Kahan('stochastic')", arithmetic="format", sizes=SMALL),
    UpdateCase("SGD", FP32, "e4m3", "kahan", arithmetic="format", sizes=SMALL),
    # Moments in their own formats and dtypes.
    UpdateCase("AMSGrad", BF16, state="fp32", sizes=SMALL),
    UpdateCase("AMSGrad", BF16, state="e5m2", state_rounding="stochastic"),
    UpdateCase("SGD", BF16, state="fp16", state_rounding="Stochastic(bits=16)", sizes=SMALL),
    UpdateCase("AdamW", FP32, state="bf16", state_rounding="stochastic"),
    # Gradients of all dtypes, scaled gradients, and shards.
    *[UpdateCase("AdamW", BF16, grad=dtype, sizes=SMALL) for dtype in (BF16, FP16, FP64)],
    UpdateCase("AdamW", FP32, "e4m3", grad=FP64, scale=3.0, sizes=SMALL),
    UpdateCase("SGD", BF16, grad=BF16, scale=1024.0, arithmetic="format", sizes=SMALL),
    UpdateCase("AdamW", BF16, places=PLACES),
    UpdateCase("AMSGrad", BF16, places=PLACES, state_rounding="stochastic", sizes=SMALL),
    UpdateCase("AdamW", BF16, "e4m3", places=(2**33 + 8, 0, 0, 2**32, 3, 2**31), sizes=SMALL),
    # A first block that is read with wide accesses, from an offset; whole programs of such blocks.
    UpdateCase("AdamW", BF16, places=(8, 0, 0, 0, 0, 0), sizes=((4096,), (5,)), steps=1),
    # No elements, and no dimensions.
    UpdateCase("AdamW", sizes=((0,), (), (3, 0), (1,))),
    UpdateCase("SGD", sizes=((0,),)),
]


Arrange = Callable[[Tensor], Tensor]


def weights(case: UpdateCase) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(size, generator=generator) for size in case.sizes]
    return [qsim.quantize(x, case.setting.weight).to(case.dtype) for x in whole]


def gradients(case: UpdateCase, step: int) -> list[Tensor]:
    """With NaN, infinities and zeros of both signs at the second step."""
    generator = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(size, generator=generator).to(case.grad) for size in case.sizes]
    if step == 1 and found[0].numel() > 6:
        found[0].view(-1)[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 0.0, -0.0])
    return found


def states(case: UpdateCase, device: torch.device, arrange: Arrange) -> list[list[Tensor]]:
    """Zeros in the order of the operator's arguments; lists that an algorithm does not use are empty."""
    algorithm, setting = ALGORITHMS[case.algorithm], case.setting
    adam = isinstance(algorithm, AdamAlgorithm)
    moments = [adam or algorithm.momentum != 0, adam, adam and algorithm.amsgrad]
    dtypes = [setting.state_dtype] * 3 + [case.dtype]
    wanted = [*moments, setting.kahan]
    lists = [
        [arrange(torch.zeros(size, dtype=dtype, device=device)) for size in case.sizes] if is_wanted else []
        for is_wanted, dtype in zip(wanted, dtypes, strict=True)
    ]
    steps = [torch.zeros((), dtype=torch.int64, device=device) for _ in case.sizes]
    products = [torch.ones(2, device=device) for _ in case.sizes] if adam and setting.in_format else []
    return [*lists, steps, products]


def run(
    update: Callable[..., Any], case: UpdateCase, device: torch.device, arrange: Arrange = lambda x: x, lr: Tensor | None = None
) -> list[Tensor]:
    """All tensors after a few steps, on the CPU.

    Args:
        update: `reference.update` or that of the kernels.
        case: The update.
        device: The device.
        arrange: A function that gives tensors a memory layout.
        lr: The learning rate, if it is a tensor.
    """
    params = [arrange(p.to(device)) for p in weights(case)]
    kept = states(case, device, arrange)
    lr = torch.tensor(0.01, dtype=torch.float64) if lr is None else lr
    scale = None if case.scale is None else torch.tensor(case.scale, device=device)
    places = case.places or (0, 0, 0) * len(params)
    streams = [8 + 4 * number if number % 2 else -(2**62) + 4 * number for number in range(len(params))]
    for number in range(case.steps):
        grads = [arrange(g.to(device)) for g in gradients(case, number)]
        step = Step(params, grads, *kept, lr, scale, None, 3**35, streams, places)
        update(step, ALGORITHMS[case.algorithm], case.roundings)
    return [x.cpu() for column in (params, *kept) for x in column]

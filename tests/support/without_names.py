"""A program that runs qsim without some of torch's private names, one after the other, each in a process of its own.

`python tests/support/without_names.py [--compiled] NAME...` prints a line of JSON for each: the error, if there is one, the results and the
warnings. Processes are forked after torch is imported, so that each takes two seconds instead of ten.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES = {"qsim_kernels.private": ROOT / "kernels/qsim_kernels/private.py", "qsim.private": ROOT / "qsim/private.py"}


def without(name: str) -> None:
    """Import the module that has a private name, before all others of qsim, as if this torch lacked the name."""
    for module, path in MODULES.items():
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)  # that of `qsim` imports the kernels, with what is left
        if name in loaded.NAMES:
            known = loaded.NAMES[name]
            loaded.NAMES[name] = known._replace(where=f"{known.where}_gone")
        elif name in vars(loaded):
            setattr(loaded, name, REMOVED[name])


def _as_it_is(function: Any) -> Any:
    return function


#: Functions of the modules that use attributes, and what stands for them where torch does not know the attribute.
REMOVED = {"constant": _as_it_is}


def eager() -> list[Any]:
    """The results of a few calls in eager code: roundings, a product's three results, and a step."""
    import torch

    import qsim

    torch.manual_seed(0)
    x = torch.randn(8, 64, requires_grad=True)
    found = [qsim.quantize(x.detach(), "e4m3"), qsim.quantize(torch.randn(2**17), "e2m1", "stochastic", seed=1)]
    for points in ("fp8_hybrid", "mxfp4"):
        layer = qsim.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)), points)
        loss = layer(x).square().mean()
        loss.backward()
        qsim.optim.AdamW(layer.parameters(), lr=0.1, format="bf16", update="stochastic").step()
        found += [loss.detach(), *(parameter.detach() for parameter in layer.parameters())]
    return found


def compiled() -> None:
    """A layer gives the same bits when it is compiled."""
    import torch

    import qsim

    layer, x = qsim.convert(torch.nn.Linear(64, 32), "fp8_hybrid"), torch.randn(8, 64, requires_grad=True)
    for call in (layer, lambda x: qsim.quantize(x, "e4m3", "stochastic", seed=torch.tensor(1))):
        results = []
        for run in (call, torch.compile(call)):
            y = run(x)
            results.append((y, *(torch.autograd.grad(y.sum(), [x]) if y.requires_grad else ())))
        assert all(map(torch.equal, *results)), "compiled code gives other bits"


def _looked_up(name: str) -> None:
    """Look the name up, in case that nothing did."""
    for module in map(importlib.import_module, MODULES):
        if name in module.NAMES and name not in vars(module):
            try:
                getattr(module, name)
            except ImportError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=1)


def report(name: str, compiles: bool) -> dict[str, Any]:
    """Report what happens without a name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = ""
        try:
            without(name)
            results = eager()
            digest = [round(float(x.double().sum()), 9) for x in results]
            if compiles:
                compiled()
            _looked_up(name)
        except BaseException:
            error, digest = traceback.format_exc(), []
    texts = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
    return {"name": name, "error": error, "results": digest, "warnings": texts}


def main(names: list[str], compiles: bool) -> None:
    """Print a line for each name."""
    import torch

    torch.set_num_threads(1)
    if compiles:
        torch.compile(torch.neg)(torch.ones(()))  # imports all of the compiler
    for name in names:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(report(name, compiles)), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main([each for each in sys.argv[1:] if each != "--compiled"], "--compiled" in sys.argv)

"""The workers of a Dask cluster, on other machines: one run at a time each, on one GPU each if runs need one."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from qsim.studies.measuring import machine, trial, versions
from qsim.studies.result import Result
from qsim.studies.running import Workers
from qsim.studies.study import Study

#: The resource that workers with a GPU offer, and the number of seconds within which a scheduler has to answer.
GPU, _TIMEOUT = "GPU", 10


@dataclass(frozen=True)
class Cluster:
    """Submit runs to a Dask scheduler, which assigns them to its workers and repeats those of workers that are lost.

    Attributes:
        address: The address of the scheduler, such as `"tcp://10.0.0.1:8786"`.
        device: The device to compute on: `cpu`, or `cuda`, for which every run takes one unit of the resource `GPU`.
    """

    address: str
    device: torch.device

    @contextmanager
    def ready(self, study: Study[Any, Any]) -> Iterator[Workers]:
        """Connect, and check all workers.

        Raises:
            ValueError: If the scheduler does not answer or its workers would not give this process's results.
        """
        with _client(self.address) as client:
            offers = _offers(client, study, self.device, self.address)
            if not offers:
                print(f"scheduler: {self.address} has no workers yet; runs begin when it has", file=sys.stderr)
            devices = frozenset(given.device for given in offers.values())
            submit = _submitting(client, study, self.device)

            def try_out(runs: Sequence[Any]) -> Result[Any]:
                if not offers:
                    raise ValueError(f"scheduler: {self.address} has no workers, so how long runs take cannot be measured")
                return submit(runs, 0).result()

            yield Workers(
                study,
                self.device,
                devices,
                len(offers),
                submit=lambda run, place: submit([run], place),
                try_out=try_out,
                errors=lambda: _clear_errors(self.address),
            )


@dataclass(frozen=True)
class Offer:
    """A worker's description of itself.

    Attributes:
        at_once: The number of runs that it would execute at the same time.
        device: The device, as in a result's metadata; empty if there is no GPU although one is needed.
        gpu: The identity of its GPU; empty on a CPU.
        versions: See `measuring.versions`.
    """

    at_once: int
    device: str
    gpu: str
    versions: Mapping[str, str]


def offer(module: str, device: torch.device, at_once: int) -> Offer:
    """The offer of this process, which imports a study's module first."""
    importlib.import_module(module)
    if device.type != "cuda":
        return Offer(at_once, machine(device)["device"], "", versions())
    if not torch.cuda.is_available():
        return Offer(at_once, "", "", versions())
    return Offer(at_once, machine(device)["device"], str(torch.cuda.get_device_properties(0).uuid), versions())


def checked_offers(offers: Mapping[str, Offer | None], device: torch.device, scheduler: str) -> dict[str, Offer]:
    """The offers of those workers that can execute runs.

    Args:
        offers: The offer of each worker, by its address; None if it does not have the resource `GPU` although runs need one.
        device: The device that runs need.
        scheduler: The scheduler's address, for errors.

    Raises:
        ValueError: If a worker's results would differ from this process's, or no worker has a GPU although runs need one.

    Example:
        >>> found = checked_offers({"tcp://a:1": Offer(1, "one core", "", versions())}, torch.device("cpu"), "tcp://s:8786")
        >>> found["tcp://a:1"].device
        'one core'
    """
    able = {address: given for address, given in offers.items() if given is not None}
    if offers and not able:
        raise ValueError(f"scheduler: no worker of {scheduler} offers a GPU; start each with --nthreads 1 --resources {GPU}=1")
    for address, given in able.items():
        _check_versions(given.versions, versions(), address)
        if not given.device:
            raise ValueError(f"scheduler: the worker {address} has --resources {GPU}=1, but its torch finds no GPU")
        if given.at_once != 1:
            raise ValueError(
                f"scheduler: the worker {address} would execute {given.at_once} runs at once, but runs need a process each; "
                "start it with --nthreads 1 and more workers instead"
            )
    for gpu, count in Counter(given.gpu for given in able.values()).items():
        if gpu and count > 1:
            raise ValueError(f"scheduler: {count} workers share the GPU {gpu}; start each with another CUDA_VISIBLE_DEVICES")
    return able


def _check_versions(there: Mapping[str, str], here: Mapping[str, str], address: str) -> None:
    for name, own in here.items():
        if there[name] != own:
            raise ValueError(f"scheduler: the worker {address} has {name} {there[name]}, but this process has {own}; results may differ")


@contextmanager
def _client(address: str) -> Iterator[Any]:
    if importlib.util.find_spec("distributed") is None:
        raise ValueError("scheduler: needs dask: pip install 'qsim-torch[cluster]'")
    from distributed import Client

    try:
        client = Client(address, timeout=_TIMEOUT, set_as_default=False, name="qsim-study")
    except (OSError, ValueError) as error:
        raise ValueError(f"scheduler: no Dask scheduler answers at {address!r} ({error})") from error
    with _quiet("distributed", "distributed.client"):
        try:
            yield client
        finally:
            # The scheduler drops what this client has submitted.
            client.close()


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence loggers, whose tracebacks say less than this module's errors."""
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _offers(client: Any, study: Study[Any, Any], device: torch.device, scheduler: str) -> dict[str, Offer]:
    found = client.run(_asks(type(study).__module__, device), on_error="return")
    for address, given in found.items():
        if isinstance(given, Exception):
            raise ValueError(f"scheduler: the worker {address} cannot import what this process does: {given}") from given
    return checked_offers(found, device, scheduler)


def _asks(module: str, device: torch.device) -> Callable[..., Offer | None]:
    """A function for workers that may not have qsim: because it is nested, its code is sent instead of its name."""
    resource, name = GPU if device.type == "cuda" else "", str(device)

    def ask(dask_worker: Any) -> Any:
        gpus = int(dask_worker.state.total_resources.get(resource, 0))
        if resource and not gpus:
            return None
        import torch

        from qsim.studies import cluster

        threads = dask_worker.state.nthreads
        return cluster.offer(module, torch.device(name), min(threads, gpus) if resource else threads)

    return ask


def _submitting(client: Any, study: Study[Any, Any], device: torch.device) -> Callable[[Sequence[Any], int], Future[Result[Any]]]:
    """A function that submits runs to be measured in turn to Dask's own executor of `concurrent.futures`, those of lower places first."""
    # Not pure: equal runs of another client, which may have another version, are others.
    executor = client.get_executor(pure=False, resources={GPU: 1} if device.type == "cuda" else None)

    def submit(runs: Sequence[Any], place: int) -> Future[Result[Any]]:
        future: Future[Result[Any]] = executor.submit(_measured, study, runs, device, versions(), priority=-place)
        return future

    return submit


@contextmanager
def _clear_errors(address: str) -> Iterator[None]:
    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"scheduler: a worker that joined later cannot import what this process does: {error}") from error
    except KilledWorker as error:
        raise ConnectionError(
            f"{error.allowed_failures + 1} workers died during one run: see their logs, it may need more memory"
        ) from error
    except (CancelledError, CommClosedError) as error:
        raise ConnectionError(f"the scheduler {address} was lost; finished runs are stored, the others run when called again") from error


def _measured(study: Study[Any, Any], runs: Sequence[Any], device: torch.device, expected: Mapping[str, str]) -> Result[Any]:
    """Measure runs in turn, and return the last result, after a check of this worker, which may have joined after the study began."""
    from distributed import get_worker

    _check_versions(versions(), expected, get_worker().address)
    return trial(study, runs, device)

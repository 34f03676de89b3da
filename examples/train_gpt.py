"""A GPT of any size learns in BF16, its updates rounded stochastically, or in one of four other ways.

The tokens are bytes. What it reads by default are the sources of Python's standard library, so that nothing needs to be downloaded.

    python examples/train_gpt.py --steps 200 --batch 8 --context 128
    python examples/train_gpt.py --size medium --vocabulary 50304 --compile --batch 64 --micro-batch 16 --compare stochastic,o1,nearest
    python examples/train_gpt.py --size small --compile --steps 200 --recipe "fp8_hybrid.with_(accumulate='h100_fp8')"
    torchrun --nproc-per-node 2 examples/train_gpt.py --size large --method stochastic --checkpoint run --save-every 500

With torchrun the model is sharded (FSDP2). A saved run continues with --resume, on any number of processes, as if it had never
stopped. That is true to the last bit where sums are taken in the order that they were taken in: with the same number of processes, and on
GPUs with --deterministic. It needs tqdm: `pip install -e '.[study]'`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from gpt import checkpoints, tables
from gpt.methods import METHODS
from gpt.model import SIZES, Size
from gpt.text import VOCABULARY, Text
from gpt.training import Settings, train
from gpt.world import World, join, sum_in_one_order

import qsim

T = TypeVar("T")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="GPT-2's sizes, and a tiny one (default: %(default)s)")
    add("--layers", type=_positive, help="instead of the size's")
    add("--width", type=_positive, help="instead of the size's")
    add("--heads", type=_positive, help="instead of the size's")
    add(
        "--vocabulary",
        type=_positive,
        default=VOCABULARY,
        help="rows of the embedding; tokens are bytes in any case (default: %(default)s)",
    )
    add("--context", type=_positive, default=1024, help="tokens of a sequence (default: %(default)s)")
    add("--text", nargs="+", default=[], metavar="PATH", help="files, and folders with all files in them (default: the standard library)")
    add("--method", choices=METHODS, default="stochastic", help="; ".join(f"{name}: {what}" for name, what in METHODS.items()))
    add("--recipe", metavar="NAME", help="also round in the blocks' linear layers as a recipe of qsim does, for example fp8_hybrid")
    add("--steps", type=_positive, default=1000, help="default: %(default)s")
    add("--batch", type=_positive, default=32, help="sequences of a step, of all processes together (default: %(default)s)")
    add("--micro-batch", type=_positive, help="sequences that a process takes at once (default: its share of the batch)")
    add("--lr", type=float, default=6e-4, help="the highest learning rate (default: %(default)s)")
    add("--warmup", type=int, help="steps in which the learning rate rises (default: a twentieth of them)")
    add("--betas", type=float, nargs=2, default=(0.9, 0.95), help="default: %(default)s")
    add("--weight-decay", type=float, default=0.1, help="of matrices (default: %(default)s)")
    add("--clip", type=float, default=1.0, help="norm that all gradients together may have; 0: any (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides on first weights, order of the text and random bits (default: %(default)s)")
    add("--compile", action="store_true", help="through torch.compile")
    add(
        "--deterministic",
        action="store_true",
        help="sums in one order on GPUs too, so that a run done again is the same",
    )
    add("--evaluate-every", type=int, default=0, metavar="N", help="validate after every N steps (default: only at the end)")
    add("--validation", type=_positive, metavar="N", help="sequences of held-out text (default: 64, or more to fill what is taken at once)")
    add("--checkpoint", type=Path, metavar="DIR", help="where to save the run at its end")
    add("--save-every", type=int, default=0, metavar="N", help="save after every N steps too")
    resume = "continue from the last checkpoint, or from that of a step"
    add("--losses", type=Path, metavar="FILE", help="write the loss of every step to a file, to the last bit")
    add("--resume", type=int, nargs="?", const=checkpoints.LAST, metavar="STEP", help=resume)
    add("--json", type=Path, metavar="FILE", help="add a line of results to a file")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    add("--compare", type=_list_of(str), metavar="A,B", help="train by several methods, one after the other, and print a table")
    add("--rates", type=_list_of(float), metavar="X,Y", help="with --compare: several learning rates")
    add("--seeds", type=_list_of(int), metavar="0,1", help="with --compare: several seeds")
    return parser


def settings_of(args: argparse.Namespace, world: World) -> Settings:
    size = SIZES[args.size]
    size = Size(args.layers or size.layers, args.width or size.width, args.heads or size.heads)
    own = {field.name: getattr(args, field.name) for field in fields(Settings) if hasattr(args, field.name)}
    own["micro_batch"] = args.micro_batch or max(1, args.batch // world.size)
    at_once = own["micro_batch"] * world.size
    own["validation"] = args.validation or -(-64 // at_once) * at_once
    own["warmup"] = args.steps // 20 if args.warmup is None else args.warmup
    settings = Settings(**{**own, "size": size, "betas": tuple(args.betas)})
    for name in ("batch", "validation"):
        count = getattr(settings, name)
        if count % at_once:
            raise ValueError(f"--{name}: {count} sequences are no multiple of what all processes take at once, {at_once}")
    if size.width % size.heads:
        raise ValueError(f"--heads: a width of {size.width} cannot be shared by {size.heads} heads")
    if settings.vocabulary < VOCABULARY:
        raise ValueError(f"--vocabulary: {settings.vocabulary} rows are not enough for {VOCABULARY} bytes")
    if settings.checkpoint is None and (args.save_every or args.resume is not None):
        raise ValueError("--save-every, --resume: --checkpoint is to say where")
    if args.recipe is not None:
        qsim.recipes.resolve(args.recipe)
    _check_comparison(args)
    return settings


def _check_comparison(args: argparse.Namespace) -> None:
    unknown = [name for name in args.compare or () if name not in METHODS]
    if unknown:
        raise ValueError(f"--compare: {', '.join(unknown)} is none of {', '.join(METHODS)}")
    if args.compare and args.checkpoint:
        raise ValueError("--compare, --checkpoint: a checkpoint is of one run")
    if args.compare and args.losses:
        raise ValueError("--compare, --losses: the losses are those of one run")
    if not args.compare and (args.rates or args.seeds):
        raise ValueError("--rates, --seeds: these are for --compare")


def runs(settings: Settings, args: argparse.Namespace) -> Iterator[Settings]:
    """One run, or all runs to compare."""
    if not args.compare:
        yield settings
        return
    for method, lr, seed in itertools.product(args.compare, args.rates or [settings.lr], args.seeds or [settings.seed]):
        yield replace(settings, method=method, lr=lr, seed=seed)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def main(argv: list[str] | None = None) -> None:
    parser = arguments()
    args = parser.parse_args(argv)
    if args.deterministic:
        sum_in_one_order()
    world = join(args.device)
    try:
        settings = settings_of(args, world)
        text = Text(args.text, settings.context, world.device)
        if settings.checkpoint is not None:
            lasting = {**settings.lasting(), "text": text.checksum}
            settings = replace(settings, first=checkpoints.claim(settings.checkpoint, lasting, args.resume, world))
    except ValueError as error:
        parser.error(str(error))
    if world.rank == 0:
        print(f"{text.files} files of {len(text.tokens)} bytes; {settings.steps} steps of {settings.batch} sequences of {settings.context}")
        print(tables.HEADING)
    results = []
    for run in runs(settings, args):
        results.append(train(run, world, text))
        if world.rank == 0:
            print(tables.row(results[-1]), flush=True)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    if args.compare and world.rank == 0:
        print(f"\n{tables.best(results)}")
    world.leave()


if __name__ == "__main__":
    main()

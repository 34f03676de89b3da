"""AdamW with everything in bfloat16: what rounding does to small updates, what fixes it, and how much memory that takes.

Run it with `python examples/bf16_adamw.py`. It belongs to docs/guides/pure-bf16.md.
"""

import torch
from torch import Tensor, nn

import qsim

STEPS, RATE, BETAS = 400, 3e-4, (0.9, 0.99)
MASTER = "float32 copy"


def data() -> tuple[Tensor, Tensor]:
    """The product of two of sixteen numbers."""
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    return x, (x[:, :1] * x[:, 1:2]).float()


def train(update: str, seed: int) -> tuple[float, float, float]:
    """Train; return the last loss, the share of updates that changed no weight, and the bytes kept per weight."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1)).bfloat16()
    weights: list[Tensor] = list(model.parameters())
    copies = [weight.detach().float() for weight in weights] if update == MASTER else []
    if copies:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(copies, RATE, BETAS, weight_decay=0.0)
    else:
        optimizer = qsim.optim.AdamW(weights, RATE, BETAS, weight_decay=0.0, update=update, seed=seed)
    x, y = data()
    with qsim.diagnostics.cancelled_updates(optimizer, every=20) as cancelled:
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(model(x).float(), y)
            model.zero_grad()
            loss.backward()
            for copy, weight in zip(copies, weights, strict=bool(copies)):
                assert weight.grad is not None
                copy.grad = weight.grad.float()
            optimizer.step()
            if copies:
                torch._foreach_copy_([weight.data for weight in weights], copies)
    unchanged = sum(entry.cancelled for entry in cancelled.updates) / sum(entry.updates for entry in cancelled.updates)
    kept = sum(tensor.nbytes for tensor in [*weights, *copies, *moments(optimizer)])
    return loss.item(), unchanged, kept / sum(weight.numel() for weight in weights)


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state per weight: everything but its step counters."""
    return [kept for state in optimizer.state.values() for kept in state.values() if kept.dim()]


def main() -> None:
    torch.set_num_threads(1)  # tensors this small are not worth a second thread
    print(f"{STEPS} steps of AdamW with a learning rate of {RATE:g}\n")
    print(f"{'updates':<12}  {'loss':>6}  {'changed no weight':>17}  {'bytes per weight':>16}")
    for update in ("nearest", "stochastic", "kahan", MASTER):
        loss, share, kept = train(update, seed=0)
        print(f"{update:<12}  {loss:>6.4f}  {share:>17.1%}  {kept:>16g}")


if __name__ == "__main__":
    main()

"""A linear layer that rounds, made in three ways; and what each rounding does to its output and its gradients.

Run it with `python examples/wrap_linear.py`. It belongs to the tour: docs/tour.md, "Layers".
"""

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer

POINTS = {
    "input and weight, forward": FivePoint(act="e4m3", weight="e4m3", act_bwd=None, weight_bwd=None),
    "and the same backward": FivePoint(act="e4m3", weight="e4m3"),
    "gradient only": FivePoint(grad="e5m2"),
    "gradient only, stochastic": FivePoint(grad=Quantizer("e5m2", "stochastic")),
    "all five": FivePoint("e4m3", "e4m3", "e5m2"),
}


class Own(nn.Module):
    """A custom module: it manages its own weights and takes its product from `qsim.nn.functional`."""

    def __init__(self, layer: nn.Linear, points: FivePoint) -> None:
        super().__init__()
        self.weight, self.bias, self.points = layer.weight, layer.bias, points

    def forward(self, x: Tensor) -> Tensor:
        """As in `torch.nn.Linear`, with points."""
        return qsim.nn.functional.linear(x, self.weight, self.bias, self.points)


def three_ways(layer: nn.Linear, points: FivePoint) -> dict[str, nn.Module]:
    """The same layer, made in three ways."""
    made = qsim.nn.Linear(layer.in_features, layer.out_features, points=points)
    made.load_state_dict(layer.state_dict())
    converted = qsim.convert(nn.Sequential(nn.Linear(layer.in_features, layer.out_features)), points)
    converted[0].load_state_dict(layer.state_dict())
    return {"qsim.nn.Linear": made, "qsim.convert": converted, "a module of one's own": Own(layer, points)}


def results(layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the weight."""
    torch.manual_seed(1)  # the seed of stochastic rounding is drawn here
    x = x.clone().requires_grad_()
    y = layer(x)
    weight = next(p for p in layer.parameters() if p.dim() == 2)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), gradient)]


def main() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 128)
    x, gradient = torch.randn(64, 256), torch.randn(64, 128)
    plain = results(layer, x, gradient)

    print(f"{'relative error':<28}  output  input's gradient  weight's gradient")
    for name, points in POINTS.items():
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(results(Own(layer, points), x, gradient), plain, strict=True)]
        print(f"{name:<28}  {errors[0]:>6.2%}  {errors[1]:>16.2%}  {errors[2]:>17.2%}")

    print("\nall five points, and the largest difference from qsim.nn.Linear")
    ways = {name: results(way, x, gradient) for name, way in three_ways(layer, POINTS["all five"]).items()}
    for name, found in ways.items():
        difference = max(float((a - b).abs().max()) for a, b in zip(found, ways["qsim.nn.Linear"], strict=True))
        print(f"{name:<28}  {difference:g}")


if __name__ == "__main__":
    main()

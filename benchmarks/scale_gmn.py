"""ScaleGMN: this library's nets compared with the published code, by outputs, seconds and memory of a training step.

The nets have the published settings for the classification of images of digits: SIRENs 2-32-32-1, 64 networks, 128
features, 4 layers, with forward messages or messages in both directions. A step consists of forward pass, backward pass
and AdamW, in single precision. Every row runs in a separate process with one thread. Seconds are CPU time, as the
median of several rounds after one warm-up round. Megabytes are the peak memory above the memory before the net was
made. `ChainScaleGMN` computes the same function with the same parameters. The first table contains the deviation of its
outputs from the published outputs, in double precision, relative to the largest output. `ScaleGMN`, a layer of
`Metanet`, is another function of the same width and depth.

    python benchmarks/scale_gmn.py --scalegmn FOLDER [--packages FOLDER] [--rounds 3] [--reference FILE]

The command needs a checkout of jkalogero/scalegmn. If torch_geometric is not installed, it also needs a folder with
this package. `--reference` writes the outputs of the published code for parameters given by a formula:
`tests/published_scale_gmn.json`.
"""

import argparse
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from deep_weight_space import Step, table
from torch import Tensor, nn

import regauge as rg
from regauge import weightspace as ws
from regauge.nets.mlp import MLP
from regauge_papers import chains
from regauge_papers.chains.scale_maps import Message, Perceptron, Product, Remainder, WeightUpdate

SIREN, DEEP = (2, 32, 32, 1), (3, 6, 5, 7, 2)
NETWORKS = 64
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "digits, forward": ("mnist_cls/scalegmn", (2, 8, 8, 1), {}),
    "digits, both directions": ("mnist_cls/scalegmn_bidir", (2, 8, 8, 1), {}),
    "digits, two classes, deeper": ("mnist_cls/scalegmn", DEEP, {}),
    "clothes, forward": ("fmnist_cls/scalegmn", (2, 8, 8, 1), {}),
    "clothes, both directions": ("fmnist_cls/scalegmn_bidir", (2, 8, 8, 1), {}),
    "CIFAR-10, forward": ("cifar_inr_cls/scalegmn", (2, 8, 8, 3), {}),
    "CIFAR-10, both directions": ("cifar_inr_cls/scalegmn_aug_bidir", (2, 8, 8, 3), {}),
    "CIFAR-10, both directions, without norms": ("cifar_inr_cls/scalegmn_bidir", (2, 8, 8, 3), {"num_layers": 2}),
    "editing, forward": ("mnist_editing/scalegmn", (2, 8, 8, 1), {"num_layers": 3}),
    "editing, both directions": ("mnist_editing/scalegmn_bidir", (2, 8, 8, 1), {"num_layers": 3}),
    "scales, forward": ("mnist_cls/scalegmn", DEEP, {"symmetry": "scale"}),
    "scales, both directions": ("mnist_cls/scalegmn_bidir", DEEP, {"symmetry": "scale"}),
}
"""Title, published settings, widths of the networks, and settings that differ."""


def find_published(folder: Path, packages: Path | None) -> None:
    """Make a checkout importable without its experiments, which need packages that the nets do not need."""
    if packages is not None:
        sys.path.insert(0, str(packages))
    import torch_geometric  # noqa: F401  # before its own look for the packages below

    absent = {
        "rff": (),
        "rff.layers": ("GaussianEncoding", "PositionalEncoding"),
        "torchvision": (),
        "torchvision.utils": ("save_image",),
    }
    for name, members in absent.items():
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member, None)
        sys.modules.setdefault(name, module)
    data = types.ModuleType("src.data")
    data.__path__ = [str(folder / "src/data")]
    sys.modules["src.data"] = data
    sys.path.insert(0, str(folder))


def settings_of(folder: Path, name: str, widths: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """Return the published settings, completed as by the published reader."""
    text = (folder / "configs" / f"{name}.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)["scalegmn_args"]
    found.update({**changes, "layer_layout": list(widths)})
    width = found["d_hid"]
    found["graph_init"].update(d_node=width, d_edge=width)
    found["gnn_args"]["d_hid"] = width
    found["mlp_args"]["d_k"] = [width]
    found.get("readout_args", {})["d_rho"] = width
    return found


def config_of(settings: dict[str, Any]) -> chains.ChainScaleConfig:
    """Return the settings of `ChainScaleGMN` that correspond to published settings."""
    gnn = settings["gnn_args"]
    return chains.ChainScaleConfig(
        hidden=settings["d_hid"],
        layers=settings["num_layers"],
        is_bidirectional=settings["direction"] == "bidirectional",
        signs="symmetrized" if gnn["sign_symmetrization"] else "absolute",
        ends="perceptron" if gnn["mlp_on_io"] else "gated",
        are_ends_shared=gnn["msg_num_mlps"] == 2,
        reads="everything" if settings.get("readout_range") == "full_graph" else "outputs",
        is_skipping=settings["gnn_skip_connections"],
        are_weights_placed=settings["edge_pos_embed"],
        are_messages_placed=gnn["pos_embed_msg"],
        dropout=gnn["dropout"],
        are_ends_added=settings["positional_encodings"]["sum_on_io"],
        are_perceptrons_normalized=settings["mlp_args"]["layer_norm"],
    )


def published_net(settings: dict[str, Any]) -> nn.Module:
    from src.scalegmn.models import ScaleGMN, ScaleGMN_equiv

    net: nn.Module = (ScaleGMN_equiv if settings["equivariant"] else ScaleGMN)(settings)
    return net


def our_net(settings: dict[str, Any]) -> chains.ChainScaleGMN:
    module = MLP(settings["layer_layout"], torch.relu if settings["symmetry"] == "scale" else torch.tanh)
    symmetry = rg.discover(module, (torch.randn(2, settings["layer_layout"][0]),), verify=False)
    head = ws.Equivariant() if settings["equivariant"] else ws.Invariant(settings["readout_args"]["d_out"])
    return chains.ChainScaleGMN(symmetry, config_of(settings), head=head)


def networks(widths: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> rg.Params:
    """Return networks of an MLP, computed by a formula."""
    tensors = {}
    for name, tensor in MLP(widths).state_dict().items():
        steps = torch.arange(count * tensor.numel(), dtype=torch.float64) + len(tensors)
        tensors[name] = (2.1 * steps).sin().reshape(count, *tensor.shape).to(dtype)
    return tensors


def fill(net: nn.Module) -> None:
    """Set parameters by a formula, in the order of their names: sines with a separate step for each tensor, of moderate
    size.
    """
    with torch.no_grad():
        for k, (_, parameter) in enumerate(sorted(net.named_parameters())):
            steps = torch.arange(parameter.numel(), dtype=torch.float64)
            size = 1.5 / max(1, parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 0.5
            parameter.copy_(size * (1.7 * steps + k).sin().reshape(parameter.shape))


def as_published(settings: dict[str, Any], params: rg.Params) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return a batch of graphs, with its weights `[networks, in, out, 1]` and biases `[networks, out, 1]`."""
    from src.data.data_utils import get_edge_types, get_node_types, nn_to_edge_index, to_pyg_batch
    from src.scalegmn.graph_init import batch_to_graphs
    from torch_geometric.data import Batch

    widths = settings["layer_layout"]
    tensors = list(params.values())
    weights = [weight.transpose(1, 2).unsqueeze(-1) for weight in tensors[::2]]
    biases = [bias.unsqueeze(-1) for bias in tensors[1::2]]
    hidden = torch.zeros(sum(widths), 1, dtype=torch.bool)
    hidden[widths[0] : -widths[-1]] = True
    inputs = torch.zeros_like(hidden)
    inputs[: widths[0]] = True
    common = (get_node_types(widths), get_edge_types(widths), settings["direction"], None, hidden, inputs)
    edges = nn_to_edge_index(widths, "cpu")
    graphs = zip(*batch_to_graphs(weights, biases), strict=True)
    return Batch.from_data_list([to_pyg_batch(x, e, edges, *common)[0] for x, e in graphs]), weights, biases


def names_of(net: chains.ChainScaleGMN) -> dict[nn.Module, str]:
    """Return, for each module of a net of this library, the module's name in the published code."""
    config, names = net.config, dict[nn.Module, str]()

    def perceptron(module: Perceptron, name: str) -> None:
        names.update({module.first: f"{name}.fc.0", module.norm: f"{name}.ln.0", module.last: f"{name}.fc.1"})

    def remainder(module: Remainder, name: str) -> None:
        if module.rest == "symmetrized":
            perceptron(module.rho, f"{name}.rho")

    def product(module: Product, name: str) -> None:
        inner = f"{name}.eq_layers.0"
        if hasattr(module, "linear"):
            names[module.linear] = f"{inner}.W"
        if hasattr(module, "gate"):
            remainder(module.remainder, f"{inner}.g.g1")
            perceptron(module.gate, f"{inner}.g.g1.phi")
        for end, own in module.ends.items():
            alone = f"{name}.eq_layers_{'last' if end == 'last' else 'in'}.0.rho"
            perceptron(own, f"{inner}.g.phi_{'last' if end == 'last' else 'in'}" if module.is_gated else alone)

    def message(module: Message, name: str) -> None:
        names.update({module.source: f"{name}.w_v", module.weight: f"{name}.w_e"})
        product(module.product, f"{name}.message_fn")

    def update(module: WeightUpdate, name: str) -> None:
        names[module.linear] = f"{name}.W"
        remainder(module.remainder, f"{name}.g1")
        perceptron(module.gate, f"{name}.phi")

    both = config.is_bidirectional
    for k, layer in enumerate(net.layers):
        message(layer.forward_message, f"gnn.fw_layers.{k}")
        if hasattr(layer, "backward_message"):
            message(layer.backward_message, f"gnn.bw_layers.{k}")
        product(layer.update, f"gnn.update_node_feats_fn.{k}" if both else f"gnn.fw_layers.{k}.update_node_feats_fn")
        if hasattr(layer, "forward_weights"):
            one = f"gnn.fw_layers.{k}.update_edge_attr_fn"
            update(layer.forward_weights, f"gnn.fw_update_edge_attr_fn.{k}" if both else one)
        if hasattr(layer, "backward_weights"):
            update(layer.backward_weights, f"gnn.bw_update_edge_attr_fn.{k}")
    names.update({skip: f"gnn.skip_layers.{k}" for k, skip in enumerate(net.skips)})
    names.update({net.unit: "construct_graph.proj_bias", net.weight: "construct_graph.proj_weight"})
    if hasattr(net, "classify"):
        is_whole = config.reads == "everything"
        perceptron(net.classify, "gnn.readout.global_mlp" if is_whole else "gnn.readout.rho")
        if is_whole:
            remainder(net.remainder, "gnn.readout.g1")
            perceptron(net.gate, "gnn.readout.g1.phi")
    if hasattr(net, "read_first"):
        names.update({net.read_first: "gnn.project_first", net.read_last: "gnn.project_last"})
    return names


@torch.no_grad()
def give_parameters(net: chains.ChainScaleGMN, published: nn.Module) -> None:
    """Set the parameters of the published net to the parameters of this library's net. All other parameters have no
    effect.
    """
    theirs = dict(published.named_parameters())
    for module, name in names_of(net).items():
        for own, parameter in module.named_parameters():
            theirs[f"{name}.{own}"].copy_(parameter)
    theirs["positional_embeddings.pos_embed"].copy_(net.unit_places)
    if net.config.are_weights_placed:
        theirs["positional_embeddings_edge.pos_embed"].copy_(net.weight_places)
    if isinstance(net.head, ws.Equivariant):
        for k in range(net.count):
            theirs[f"weight_scale.{k}"].copy_(net.weight_scales[k])
            theirs[f"bias_scale.{k}"].copy_(net.bias_scales[k])


@torch.no_grad()
def compare(folder: Path, case: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the outputs of the published net and of this library's net as vectors, and the settings of this library's
    net.
    """
    name, widths, changes = CASES[case]
    torch.set_default_dtype(torch.float64)
    settings = settings_of(folder, name, widths, d_hid=6, **changes)
    net, published = our_net(settings).double().eval(), published_net(settings).double().eval()
    fill(net)
    give_parameters(net, published)
    params = networks(widths, 3, torch.float64)
    graphs, weights, biases = as_published(settings, params)
    wanted, made = published(graphs, weights, biases), net(params)
    if settings["equivariant"]:
        pairs = zip(wanted[0], wanted[1], strict=True)
        parts = [x for weight, bias in pairs for x in (weight.squeeze(-1).transpose(1, 2), bias.squeeze(-1))]
        wanted = torch.cat([x.flatten(1) for x in parts], 1)
        made = torch.cat([made[key].flatten(1) for key in params], 1)
    torch.set_default_dtype(torch.float32)
    return wanted, made, asdict(net.config)


def train(net: nn.Module, read: Callable[[], Tensor], count: int = NETWORKS) -> Step:
    """Take a training step of a classifier."""
    optimizer = torch.optim.AdamW(net.train().parameters(), lr=1e-3)
    labels = torch.arange(count) % 10

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(read(), labels).backward()
        optimizer.step()

    return step


def published_step(settings: dict[str, Any]) -> Step:
    net, (graphs, _, _) = published_net(settings), as_published(settings, networks(SIREN, NETWORKS))
    return train(net, lambda: net(graphs.clone()))


def chain_step(settings: dict[str, Any]) -> Step:
    net, params = our_net(settings), networks(SIREN, NETWORKS)
    return train(net, lambda: net(params))


def layer_step() -> Step:
    module = MLP(SIREN, torch.tanh)
    symmetry = rg.discover(module, (torch.randn(2, SIREN[0]),), verify=False)
    net = ws.Metanet(symmetry, layer=ws.ScaleGMN(), head=ws.Invariant(10), width=128, depth=4)
    params = networks(SIREN, NETWORKS)
    return train(net, lambda: net(params))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scalegmn", type=Path, required=True)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference", type=Path)
    options = parser.parse_args()
    find_published(options.scalegmn, options.packages)
    found = {case: compare(options.scalegmn, case) for case in CASES}
    if options.reference is not None:
        rows = [
            {"widths": CASES[case][1], "is_scaled": "scales" in case, "config": config, "outputs": wanted.tolist()}
            for case, (wanted, _, config) in found.items()
        ]
        options.reference.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print("| published settings | ChainScaleGMN, relative difference |\n| --- | --- |")
    for case, (wanted, made, _) in found.items():
        print(f"| {case} | {float((made - wanted).abs().max() / wanted.abs().max()):.0e} |")
    print(f"\nLoad {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for title, name in (("forward", "mnist_cls/scalegmn"), ("both directions", "mnist_cls/scalegmn_bidir")):
        settings = settings_of(options.scalegmn, name, SIREN)
        rows = {
            "ScaleGMN, published": lambda settings=settings: published_step(settings),
            "ChainScaleGMN, the same function": lambda settings=settings: chain_step(settings),
            "ScaleGMN(), another function": layer_step,
        }
        table(f"2-32-32-1, 64 networks, {title}", rows, options.rounds)


if __name__ == "__main__":
    main()

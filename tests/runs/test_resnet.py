"""The nine ResNets have torchvision's layers and tensors, and take any number of channels and small images."""

from pathlib import Path

import pytest
import torch
import torchvision
from conftest import weights
from safetensors.torch import load_file, save_file
from torch import nn

from deeplightning.config.examine import examine
from deeplightning.model import resnet

ROOT = Path(__file__).resolve().parents[2]

# Numbers of parameters for 1,000 classes and 3 channels, from torchvision's manual.
SIZES = {
    "ResNet18": 11_689_512,
    "ResNet34": 21_797_672,
    "ResNet50": 25_557_032,
    "ResNet101": 44_549_160,
    "ResNet152": 60_192_808,
    "ResNeXt50": 25_028_904,
    "ResNeXt101": 88_791_336,
    "WideResNet50": 68_883_240,
    "WideResNet101": 126_886_696,
}


def on_meta(name: str, num_classes: int, num_channels: int = 3) -> nn.Module:
    """Return a network on the device `meta`: random values for 473 million parameters would take most of the time."""
    with torch.device("meta"):
        return getattr(resnet, name)(num_classes, num_channels)


def averaging(name: str, num_channels: int) -> nn.Module:
    """Return a network with constant weights: each layer takes means, so outputs are finite at any depth."""
    network = on_meta(name, 10, num_channels).to_empty(device="cpu")
    for key, tensor in network.state_dict().items():
        scale = 1 / tensor[0].numel() if tensor.ndim > 1 else 0.5 if key.endswith(("weight", "var")) else 0
        tensor.fill_(scale)
    return network.eval()


@pytest.mark.parametrize("name", SIZES)
def test_all_nine_take_grey_and_coloured_pictures(name):
    """DL-68: 1x28x28 and 3x32x32 pixels give a finite logit per class; the networks have the published sizes."""
    assert sum(p.numel() for p in on_meta(name, 1000).parameters()) == SIZES[name]
    for channels, size in ((1, 28), (3, 32)):
        with torch.no_grad():
            logits = averaging(name, channels)(torch.rand(2, channels, size, size))
        assert logits.shape == (2, 10)
        assert torch.isfinite(logits).all()


def test_it_is_torchvisions_network():
    """With three channels and the usual stem, the same seed gives torchvision's tensors under the same names."""
    torch.manual_seed(1)
    ours = resnet.ResNet18(5).state_dict()
    torch.manual_seed(1)
    theirs = torchvision.models.resnet18(num_classes=5).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_stem_for_small_pictures_keeps_them_large():
    """`small_images`: a 3x3 convolution of stride 1 and no pooling, so 32x32 pixels reach the last block as 4x4."""
    small, usual = resnet.ResNet18(10, small_images=True), resnet.ResNet18(10, num_channels=2)
    assert (small.conv1.weight.shape, small.conv1.stride) == ((64, 3, 3, 3), (1, 1))
    assert usual.conv1.weight.shape == (64, 2, 7, 7)
    sides = []
    for network, channels in ((small, 3), (usual, 2)):
        network.layer4.register_forward_hook(lambda _, __, out: sides.append(out.shape[-1]))
        network.eval()(torch.rand(1, channels, 32, 32))
    assert sides == [4, 1]


# ---- in a run

SMALL = ["data.module.params.limit=40", "train.num_epochs=1"]
RESNET = "{type: deeplightning.model.resnet.ResNet18, params: {num_classes: 10, num_channels: 1}}"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A file of torchvision's tensors for 1,000 classes, like its pretrained weights."""
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("pretrained") / "resnet18.safetensors"
    save_file(torchvision.models.resnet18().state_dict(), path)
    return path


def test_one_line_changes_the_network_and_pretrained_weights_are_taken(train, pretrained):
    """DL-15: `model.network` alone replaces a CNN by a ResNet-18. It takes torchvision's tensors that fit and names
    those that do not: the first layer for one channel, and the last for ten classes."""
    run = train(f"model.network={RESNET}", f"model.init_from='{pretrained}'", "model.optimizer.params.lr=0", *SMALL)
    output = run.err + run.out
    assert "ResNet18: 11,175,370 parameters" in output
    assert "network.conv1.weight, network.fc.weight, network.fc.bias" in output
    ours = {name.removeprefix("network."): t for name, t in weights(run.folder / "last.ckpt").items()}
    theirs = load_file(pretrained)
    assert set(ours) == set(theirs)
    moving = ("running_mean", "running_var", "num_batches_tracked")  # change in training whatever the rate
    same = [n for n in ours if not n.endswith(moving) and not n.startswith(("conv1", "fc"))]
    assert len(same) == 59
    assert all(torch.equal(ours[name], theirs[name]) for name in same)


def test_a_pretrained_network_is_a_feature_extractor_or_fine_tuned(fit):
    """BO-16: after `model.init_from`, `model.trainable: head` changes only the tensors of the last layer, `all` changes
    every one."""
    base = fit(*SMALL).folder / "last.ckpt"
    before = weights(base)
    head = {"network.classifier.weight", "network.classifier.bias"}
    for trainable, learned in (("head", head), ("all", set(before))):
        after = fit(f"model.init_from='{base}'", f"model.trainable={trainable}", *SMALL).folder / "last.ckpt"
        assert {name for name, now in weights(after).items() if not torch.equal(before[name], now)} == learned


def test_missing_pretrained_weights_are_named(train, tmp_path):
    """UT-12: a folder that does not exist, or has no weights, is named with exit code 4."""
    (tmp_path / "empty").mkdir()
    for folder, words in (("nowhere", "There is no run folder"), ("empty", "there are no weights in this folder")):
        run = train(f"model.init_from='{tmp_path / folder}'", code=4)
        assert words in run.err
        assert str(tmp_path / folder) in run.err


ENGINES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"]


@pytest.mark.parametrize(
    ("config", "engine"), [("resnet18", "null"), *(("resnet18", engine) for engine in ENGINES), ("vit", "ddp")]
)
def test_one_file_for_seven_engines(config, engine):
    """ST-63: the configs of CIFAR-10, ResNet and Vision Transformer, pass `check` under each engine by one override."""
    processes = 1 if engine == "null" else 2  # CPU processes, since `engine.gpus` counts the GPUs of this machine
    override = [f"engine.backend={engine}", "engine.gpus=null", f"engine.processes={processes}"]
    assert examine(ROOT / "configs" / f"cifar10_{config}.yaml", override).faults == []


# ---- networks of other packages


def test_a_network_of_torchvision_by_name(command, store, tmp_path):
    """Any network of torchvision is a plain target: it trains, and its params are checked against its signature."""
    shapes = ["data.module.params={train: 20, test: 10}", "data.batch_size=6", "train.num_epochs=1"]
    shapes += ["model.optimizer.groups=[]", "train.export=false", f"logger.params.tracking_uri={store}"]
    network = "model.network={{type: torchvision.models.mobilenet_v3_small, params: {{{}: 10}}}}"
    config = ROOT / "examples" / "cifar10" / "cifar10.yaml"
    run = command("train", config, *shapes, network.format("num_classes"), cwd=tmp_path, code=0)
    assert weights(run.folder / "last.ckpt")["network.classifier.3.weight"].shape == (10, 1024)
    faults = examine(config, [*shapes, "model.network={type: torchvision.ops.MLP, params: {x: 10}}"]).faults
    assert ("model.network.params.x", 2) in [(fault.key, fault.exit_code) for fault in faults]

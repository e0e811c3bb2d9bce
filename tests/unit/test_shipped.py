"""The option groups that ship."""

import pytest

from deeplightning.config.examine import examine
from deeplightning.config.packages import HOME


@pytest.mark.parametrize("data", ["digits", "mnist", "cifar10", "image_folder"])
def test_the_shipped_options_of_groups_fit_each_other(here, data):
    """Each network works with each dataset, on the command line and in `_base_`, outside a clone."""
    (here / "mine.yaml").write_text(
        f"_base_: ['pkg://deeplightning/configs/images.yaml', {{model: vit}}, {{data: {data}}}]\n"
    )
    assert sorted(path.stem for path in (HOME / "configs" / "model").glob("*.yaml")) == ["cnn", "resnet18", "vit"]
    for model, network in (("cnn", "SimpleCNN"), ("resnet18", "ResNet18"), ("vit", "ViT")):
        for path, options in (
            ("mine.yaml", [f"model={model}"]),
            ("pkg://deeplightning/configs/images.yaml", [f"model={model}", f"data={data}"]),
        ):
            found = examine(path, [*options, "data.root=."])
            assert found.faults == []
            assert found.config.model.network.type.endswith(f".{network}")

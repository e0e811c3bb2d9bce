"""Hugging Face encoders from a local folder: offline, without foreign code, pretrained or from scratch."""

import json
import sys

import numpy as np
import pytest
import torch
from deeplightning_hub.encoder import Encoder, FolderError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fine", "dull", "film", "not", ",", "."]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "max_position_embeddings": 20, "pad_token_id": 0}
CONFIG_JSON = json.dumps({"model_type": "bert"} | SIZES)

CONFIG_OF_A_RUN = """\
seed: 1
data:
  root: '{root}'
  module: {{type: deeplightning.data.text.TextData, params: {{train: train.tsv{params}}}}}
  batch_size: 8
model:
  module: {{type: deeplightning.task.text_classif.TextClassification}}
  network: {{type: {network}, params: {{folder: '{folder}', num_classes: 2}}}}
  optimizer: {{type: torch.optim.AdamW, params: {{lr: 2.0e-5}}, groups: [{{match: 'bias|LayerNorm', weight_decay: 0}}]}}
  loss: {{type: torch.nn.CrossEntropyLoss}}
train: {{num_epochs: 1, export: false}}
logger: {{params: {{tracking_uri: '{store}', system_metrics: false}}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small BERT with weights and a tokenizer, as saved by `save_pretrained`, without a classification head."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    path = tmp_path_factory.mktemp("a model")
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(path)
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "is not a folder; it must contain config.json and the weights of a model"),
        ({}, "has no config.json"),
        ({"config.json": "{"}, "config.json cannot be read"),
        ({"config.json": '{"auto_map": {}}'}, "requires its own code"),
        ({"config.json": CONFIG_JSON, "pytorch_model.bin": ""}, "other weight files could run code"),
    ],
)
def test_a_folder_that_is_no_model_is_rejected(tmp_path, files, words):
    """A missing or damaged folder, custom code and pickled weights end with exit code 3 and the path of the folder."""
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    with pytest.raises(FolderError, match=words) as raised:
        Encoder(str(path), 2)
    assert raised.value.exit_code == 3
    assert str(path) in str(raised.value)


def test_without_the_extra_the_error_has_the_install_command(tmp_path, monkeypatch):
    """The error names the missing package and the command that installs it."""
    (tmp_path / "config.json").write_text(CONFIG_JSON)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"transformers.*pip install 'deeplightning\[text\]'"):
        Encoder(str(tmp_path), 2, pretrained=False)


@torch.no_grad()
def test_weights_are_the_folders_or_drawn(folder):
    """A pretrained encoder has the tensors of the file, one from scratch has others. Padding changes no logit."""
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")
    name = next(name for name in saved if name.endswith("word_embeddings.weight"))
    made, scratch = Encoder(str(folder), 3).eval(), Encoder(str(folder), 3, pretrained=False).eval()
    embedding = dict(made.model.named_parameters())[f"bert.{name}"]
    assert torch.equal(embedding, saved[name])
    assert not torch.equal(dict(scratch.model.named_parameters())[f"bert.{name}"], saved[name])
    assert (made.vocabulary_size, made.padding, made.max_length) == (len(WORDS), 0, 20)
    short = torch.tensor([[2, 5, 6, 3]])
    assert made(short).shape == (1, 3)
    assert torch.allclose(made(short), made(torch.nn.functional.pad(short, (0, 9))), atol=1e-5)


def test_the_tokenizer_of_the_folder_encodes_texts(folder):
    """Each text gets special tokens, which truncation keeps; the file's own truncation and padding are ignored."""
    from deeplightning.text_spec import TextSpec, VocabularyError

    spec = TextSpec("hugging_face", (folder / "tokenizer.json").read_text())
    assert (spec.size, spec.padding, spec.file) == (len(WORDS), 0, "tokenizer.json")
    assert spec.encode(["A fine film, not dull", ""]) == [[2, 5, 6, 8, 10, 9, 7, 3], [2, 3]]
    assert spec.encode(["a fine film"], max_length=3) == [[2, 5, 3]]
    with pytest.raises(VocabularyError, match=r"not a tokenizer\.json of Hugging Face"):
        TextSpec("hugging_face", "{}")


def test_a_run_is_fine_tuned_exported_and_served(folder, command, tmp_path, store):
    """A run with the folder's tokenizer exports a bundle with that tokenizer, whose answers equal the network's."""
    from deeplightning.export.bundle import export
    from deeplightning.run.load import trained_task
    from deeplightning.runfolder import RunFolder
    from serve.bundle import Bundle

    texts = ["a fine film", "a dull film .", "not a dull film", "not fine , dull"]
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{n % 2}\n" for n, text in enumerate(texts * 4)))
    config = tmp_path / "fine_tune.yaml"
    tokens, network = f", tokenizer: '{folder}'", "deeplightning_hub.encoder.Encoder"
    config.write_text(CONFIG_OF_A_RUN.format(root=tmp_path, params=tokens, network=network, folder=folder, store=store))
    outcome = command("train", config, cwd=tmp_path, code=0)
    run = RunFolder(outcome.folder)
    task, _, _ = trained_task(run)
    export(task, run, np.array(texts), {})
    bundle = Bundle.open(run.path)
    assert bundle.labels == ["0", "1"]
    rows = bundle.predict(bundle.spec.stack([bundle.spec.prepare(text) for text in texts]))
    with torch.no_grad():
        wanted = [task.network(torch.tensor([tokens])).softmax(1)[0] for tokens in task.text_spec.encode(texts)]
    assert rows == pytest.approx(torch.stack(wanted).numpy(), abs=1e-4)


def test_a_folder_that_is_missing_is_one_note(command, tmp_path, store):
    """A missing folder ends with exit code 3, and nothing is downloaded. The short name `Encoder` works; the former
    name is rejected with the present one."""
    (tmp_path / "train.tsv").write_text("a fine film\t1\na dull film\t0\n" * 8)
    config = tmp_path / "missing.yaml"
    config.write_text(CONFIG_OF_A_RUN.format(root=tmp_path, params="", network="Encoder", folder="none", store=store))
    outcome = command("train", config, cwd=tmp_path, code=3)
    assert f"{tmp_path}/none is not a folder; it must contain config.json" in outcome.err.replace("\n", " ")
    assert "Traceback" not in outcome.err
    former = "model.network.type=deeplightning.model.hugging_face.Encoder"
    former = command("check", config, former, cwd=tmp_path, code=2)
    assert "is called deeplightning_hub.encoder.Encoder here" in former.err + former.out


@pytest.mark.parametrize("pretrained", [True, False])
def test_an_encoder_is_in_training_mode(folder, pretrained):
    """Dropout is on in training: transformers' `from_pretrained` turns it off."""
    assert all(part.training for part in Encoder(str(folder), 3, pretrained=pretrained).modules())

"""The bucketed sampler: its lengths, the arguments that it refuses, its order, and errors of a similar sampler."""

import itertools
import json
import os
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import python
from conftest import digest
from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, default_collate

from deeplightning.config.schema import Target
from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.of_datasets import _Batches
from deeplightning.data.samplers import BucketedDistributedSampler, SampledBatches, sort_values
from deeplightning.data.train_sampler import train_sampler

SAMPLER = "deeplightning.data.samplers.BucketedDistributedSampler"
BUCKETED = f"data.sampler={{type: {SAMPLER}, params: {{buckets: 2, sort_key: labels, min_samples_per_bucket: 60}}}}"


def ranks(size, buckets, batch_size, world, sizes=None, epoch=0, **options):
    """Return the sampler of each rank; samples are in order of size unless `sizes` is given."""
    order = np.arange(size) if sizes is None else np.argsort(sizes, kind="stable")
    options["num_replicas"] = world
    with warnings.catch_warnings(action="ignore"):
        made = [
            BucketedDistributedSampler(range(size), buckets, batch_size, order, rank=rank, **options)
            for rank in range(world)
        ]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def mixed(samplers, buckets) -> tuple[int, int]:
    """Return how many batches of all ranks have samples of several buckets, and the number of batches."""
    of = np.empty(sum(map(len, buckets)), dtype=int)
    for number, bucket in enumerate(buckets):
        of[bucket] = number
    batches = [of[list(s)].reshape(-1, s.batch_size) for s in samplers]
    flat = np.concatenate(batches)
    return int((flat.min(1) != flat.max(1)).sum()), len(flat)


def cut(size: int, buckets: int) -> list[list[int]]:
    """Divide 0 … size - 1 into so many parts, the first ones longer by one, without numpy."""
    short, longer = divmod(size, buckets)
    lengths = [short + (number < longer) for number in range(buckets)]
    return [list(range(sum(lengths[:n]), sum(lengths[: n + 1]))) for n in range(buckets)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("shape", "options", "length", "lost", "repeated", "of_several"),
    [
        ((1000, 2, 10, 2), {}, 500, 0, 0, 0),
        ((1010, 2, 10, 2), {}, 520, 0, 30, 0),
        ((1010, 2, 10, 2), {"drop_last": True}, 500, 10, 0, 0),
        ((1001, 4, 8, 4), {"drop_last": True}, 224, 105, 0, 0),
        ((410, 4, 51, 2), {}, 408, 0, 406, 0),
        ((1050, 2, 10, 2), {"drop_last": True, "allow_bucket_overlap": True}, 520, 10, 0, 0),
        ((1020, 2, 10, 2), {"drop_last": True, "allow_bucket_overlap": True}, 510, 0, 0, 2),  # left: exactly one slice
        ((1003, 3, 7, 3), {"drop_last": True, "allow_bucket_overlap": True}, 329, 16, 0, 4),
    ],
)
def test_lengths_losses_and_repeats(shape, options, length, lost, repeated, of_several, shuffle):
    """The table has samples per rank, samples that are lost or come twice, none more often, and batches of several
    buckets. Positions are `int`: JSON and some datasets do not accept NumPy's integers."""
    size, buckets, batch_size, world = shape
    samplers = ranks(*shape, shuffle=shuffle, **options)
    assert [len(s) for s in samplers] == [len(list(s)) for s in samplers] == [length] * world
    seen = Counter(position for s in samplers for position in s)
    assert {*map(type, seen)} == {int}
    assert size - len(seen) == lost
    assert sum(seen.values()) - len(seen) == repeated
    assert max(seen.values()) == (2 if repeated else 1)
    num_mixed, num_batches = mixed(samplers, cut(size, buckets))
    assert num_mixed == of_several or (shuffle and of_several)
    assert num_batches == length * world // batch_size


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1001, 4, 8, 4), {"drop_last": True}, r"leaves out 105 of 1001 samples in each epoch; use fewer"),
        ((410, 4, 51, 2), {}, r"406 of 410 samples, which repeat"),
    ],
)
def test_lost_and_repeated_samples_are_reported(shape, options, words):
    """A warning says how many samples are left out or repeated, if they are a twentieth or more."""
    size, buckets, batch_size, world = shape
    with pytest.warns(UserWarning, match=words):
        BucketedDistributedSampler(range(size), buckets, batch_size, range(size), num_replicas=world, rank=0, **options)
    with warnings.catch_warnings(action="error"):
        BucketedDistributedSampler(range(1010), 2, 10, range(1010), num_replicas=2, rank=0, **options)


def test_all_ranks_draw_from_the_same_bucket_at_each_step():
    """With 1,000 samples, 5 buckets and batches of 10, two ranks draw from one bucket at each of 50 steps."""
    sizes = np.random.RandomState(3).permutation(1000)
    steps = zip(*(np.array(list(s)).reshape(-1, 10) for s in ranks(1000, 5, 10, 2, sizes)), strict=True)
    buckets = [{*(sizes[np.concatenate(both)] // 200)} for both in steps]
    assert len(buckets) == 50
    assert all(len(found) == 1 for found in buckets)
    assert len({found.pop() for found in buckets[:10]}) > 1, "the slices are in no order of size"


def test_a_bucket_is_filled_up_from_its_own_start():
    """A bucket of 505 samples repeats its first 15 for 26 slices of 20. Each of two ranks takes every second sample."""
    first, second = (list(s) for s in ranks(1010, 2, 10, 2, shuffle=False))
    whole = [position for pair in zip(first, second, strict=True) for position in pair]
    assert whole == [*range(505), *range(15), *range(505, 1010), *range(505, 520)]


def test_both_permutations_change_with_the_epoch_and_seed_and_with_nothing_else():
    """The samples of a batch and the bucket of a step depend on epoch and seed, and on nothing else."""

    def order(epoch, seed):
        sampler = ranks(400, 4, 10, 1, epoch=epoch, seed=seed)[0]
        steps = np.array(list(sampler)).reshape(-1, 10)
        return steps.tobytes(), (steps[:, 0] // 100).tobytes(), sorted(map(sorted, steps.tolist()))

    found = [order(*key) for key in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert found[0] == order(0, 0)
    for values in zip(*found, strict=True):
        assert all(one != other for one, other in itertools.combinations(values, 2))


def test_the_order_is_frozen():
    """The order of a seed is the same in any later version."""
    sampler = ranks(12, 2, 2, 1, seed=42, min_samples_per_bucket=1)[0]
    assert list(sampler) == [4, 1, 8, 7, 0, 2, 6, 9, 11, 10, 5, 3]


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((100, 2, 60, 1), {}, r"a bucket has 50 samples, fewer than a step takes: 60"),
        ((100, 2, 60, 1), {"on_small_bucket": "warn"}, r"fewer than a step takes"),
        ((300, 2, 100, 1), {"drop_last": True}, r"a bucket has 150 samples, fewer than two steps take"),
        ((198, 2, 10, 1), {}, r"than min_samples_per_bucket=100; use fewer buckets, or set on_small_bucket: warn"),
        ((1050, 2, 10, 2), {"allow_bucket_overlap": True}, "allow_bucket_overlap needs drop_last: without it"),
        ((100, 0, 10, 1), {}, "buckets must be a whole number of at least 1, not 0"),
        ((100, 1, None, 1), {}, "batch_size must be"),
        ((1000, 1, 10, 1), {"on_small_bucket": "ignore"}, "must be error or warn, not 'ignore'"),
        ((1000, 1, 10, 1), {"seed": -1}, "seed must be at least 0"),
        ((1000, 1, 10, 1), {"sort_key": "labels"}, "give sort_key, .* or sorted_idx"),
    ],
)
def test_impossible_arguments_are_refused(shape, options, words):
    """Buckets that are too small and invalid arguments are errors."""
    with pytest.raises(ValueError, match=words):
        ranks(*shape, **options)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (range(999), "has 999 positions, the set 1000 samples"),
        (range(1001), "has 1001 positions, the set 1000 samples"),
        ([0, 0, *range(2, 1000)], "each position from 0 to 999 once"),
        (range(1, 1001), "each position from 0 to 999 once"),
        (np.linspace(0, 999, 1000), "each position from 0 to 999 once"),
    ],
)
def test_an_order_that_is_none_is_refused(order, words):
    """An order that is too short or too long, repeats a position, starts at 1, or has floats is an error."""
    with pytest.raises(ValueError, match=words):
        BucketedDistributedSampler(range(1000), 2, 10, order)


def test_lightning_and_our_loaders_take_it_as_it_is(job, tmp_path):
    """Under ddp nothing shards the sampler again: the processes see every sample, those that pad a bucket twice."""
    saw = f"train.callbacks=[{{type: own.SavedColumn, params: {{folder: '{tmp_path}', column: index}}}}]"
    job(BUCKETED, saw, "data.batch_size=8")
    saw = [json.loads((tmp_path / f"saw_{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):  # 134 samples, 67 a bucket: 5 slices of 16 need 26 more
        steps = list(zip(*(of_rank[epoch] for of_rank in saw), strict=True))
        assert len(steps) == 10
        assert {len(batch) for both in steps for batch in both} == {8}
        seen = Counter(position for both in steps for batch in both for position in batch)
        assert sorted(seen) == list(range(134))
        assert Counter(seen.values()) == {1: 108, 2: 26}
    assert saw[0][0] != saw[0][1]


def test_the_two_permutations_have_a_stream_each():
    """The order of slices and the order of samples have separate random streams, which differ at equal lengths."""
    seeds = [np.random.SeedSequence([0, 0], spawn_key=(stream,)) for stream in (0, 1)]
    inside, slices = (np.random.RandomState(np.random.MT19937(seed)).permutation(100) for seed in seeds)
    assert list(ranks(100, 1, 1, 1)[0]) == inside[slices].tolist()
    assert inside.tolist() != slices.tolist()


def differ():
    """Run in each of two processes, of which the second sorts in reverse."""
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", world_size=2, rank=rank)
    same = BucketedDistributedSampler(range(400), 2, 10, range(400))
    assert (same.num_replicas, same.rank, len(list(same))) == (2, rank, 200)
    other = BucketedDistributedSampler(range(400), 2, 10, range(400)[:: -1 if rank else 1])
    with pytest.raises(ValueError, match="the processes 1 have other buckets than process 0"):
        list(other)
    print("noticed")


def test_ranks_with_different_orders_are_noticed(command, tmp_path):
    """If two processes sort differently, both raise an error; rank and world size are those of the process group."""
    outcome = command(cwd=tmp_path, ranks=2, main="test_buckets:differ")
    assert [rank.out for rank in outcome.ranks] == ["noticed\n"] * 2, outcome


@pytest.mark.parametrize("shuffle", [True, False])
def test_iterating_changes_nothing(shuffle):
    """Two iterations give the same order, with or without shuffling, and leave the buckets unchanged."""
    sampler = ranks(1003, 3, 7, 3, drop_last=True, allow_bucket_overlap=True, shuffle=shuffle)[1]
    before = [bucket.copy() for bucket in sampler._buckets]
    assert list(sampler) == list(sampler)
    assert all(np.array_equal(*pair) for pair in zip(before, sampler._buckets, strict=True))


def test_nothing_optional_is_imported():
    """The sampler imports torch and numpy, but no package that a dataset or an engine needs."""
    program = "import sys, deeplightning.data.samplers; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    imported = set(python("-c", program).stdout.split())
    assert {"torch", "numpy"} <= imported
    absent = {"pytorch_lightning", "deepspeed", "horovod", "sklearn", "mlflow", "PIL", "transformers", "torchvision"}
    assert not absent & imported


def test_one_process_needs_no_group_and_resumes_inside_an_epoch():
    """Without a process group the sampler is rank 0 of 1; `start` skips batches of this epoch only."""
    sampler = BucketedDistributedSampler(range(1000), 2, 10, range(1000))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    whole = list(sampler)
    sampler.start = 3
    assert list(sampler) == whole[30:]
    assert len(sampler) == 1000
    sampler.set_epoch(1)
    assert len(list(sampler)) == 1000


@pytest.mark.parametrize(
    ("sampler", "steps"),
    [
        (BUCKETED, 4),
        pytest.param(BUCKETED, 10, marks=pytest.mark.slow),
        pytest.param("data.sampler=balanced", 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_inside_an_epoch_and_at_its_end_bit_for_bit(sampler, steps, train):
    """A run resumed inside or at the end of the first epoch ends with the weights of an uninterrupted run."""
    settings = [sampler, "logger.log_every_n_steps=100"]
    whole = train(*settings).folder
    first = train(*settings, "~train.num_epochs", f"train.max_steps={steps}").folder
    resumed = train(*settings, f"train.resume_ckpt='{first}'").folder
    assert digest(resumed / "last.ckpt") == digest(whole / "last.ckpt")


def test_limits_can_be_warnings():
    """`on_small_bucket: warn` turns the errors about small buckets into warnings."""
    for (size, batch_size), options, words in (
        ((202, 100), {"drop_last": True}, "fewer than two steps take"),
        ((198, 10), {}, "fewer than min_samples_per_bucket=100; use fewer buckets"),
    ):
        with pytest.warns(UserWarning, match=words):
            BucketedDistributedSampler(range(size), 2, batch_size, range(size), on_small_bucket="warn", **options)
    with warnings.catch_warnings(action="error"):
        BucketedDistributedSampler(range(198), 2, 10, range(198), min_samples_per_bucket=99)


class Sentences(Dataset):
    """Texts of one to nine words, with a column of their word counts."""

    def __init__(self):
        self.texts = ["word " * (1 + number * 7 % 9) for number in range(900)]
        self.words = torch.tensor([len(text.split()) for text in self.texts])

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, position):
        return {"text": self.texts[position], "tokens": torch.ones(len(self.texts[position].split()))}


def test_samples_are_sorted_by_a_column_a_key_or_a_function():
    """The sort key is an attribute of the dataset, a key of its samples (a text counts by its length), or a function.
    With one bucket per length, batches need no padding."""
    sentences = Sentences()
    expected = [len(text.split()) for text in sentences.texts]
    assert sort_values(sentences, "words").tolist() == expected
    assert sort_values(sentences, "tokens").tolist() == expected
    assert sort_values(sentences, "text").tolist() == [5 * count for count in expected]
    assert sort_values(sentences, lambda sample: len(sample["text"].split())).tolist() == expected
    with pytest.raises(ValueError, match=r"'length'.* has no such column"):
        sort_values(sentences, "length")
    with pytest.raises(ValueError, match="not a number and has no length"):
        sort_values(sentences, lambda sample: None)
    sampler = BucketedDistributedSampler(sentences, 9, 10, sort_key="words")
    loader = DataLoader(sentences, batch_size=10, sampler=sampler, collate_fn=lambda rows: rows)
    assert {len({len(row["tokens"]) for row in batch}) for batch in loader} == {1}


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("{buckets: 2, sort_key: length}", "data.sampler.params.sort_key 'length': the training set (InMemory) has no"),
        ("{buckets: 99, sort_key: labels}", "fewer than a step takes: 16 (batch_size 16 x 1 process(es))"),
        ("{buckets: 1}", "give sort_key, which to sort the samples by, or sorted_idx"),
        ("{buckets: 2, sort_key: labels, batch_size: 3}", "data.sampler.params.batch_size cannot be set"),
    ],
)
def test_an_impossible_sampler_is_refused_before_a_run(sampler, words, train, store):
    """An impossible sampler is one error with exit code 2, and no run is created."""
    before = [*store.glob("*/*")]
    outcome = train(f"data.sampler={{type: {SAMPLER}, params: {sampler}}}", code=2)
    assert words in outcome.err
    assert outcome.err.count("error: ") == 1
    assert [*store.glob("*/*")] == before


def test_data_without_a_length_are_refused():
    """A dataset without a length cannot be divided into buckets."""

    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="with a length, which Endless lacks"):
        BucketedDistributedSampler(Endless(), 2, 10, sort_key="words")
    cfg = SimpleNamespace(seed=1, data=SimpleNamespace(batch_size=4, sampler=Target(type=SAMPLER)))
    with pytest.raises(DataConfigError, match=r"data\.sampler needs a training set with a length, not Endless"):
        train_sampler(cfg, Endless())


def test_check_knows_which_params_the_run_sets(command, tiny, place):
    """`check` does not require the dataset and the params that the run sets, and checks the other params."""
    good = f"data.sampler={{type: {SAMPLER}, params: {{buckets: 2, sort_key: {{ref: own.schedule}}}}}}"
    command("check", tiny, good, cwd=place, code=0)
    bad = command("check", tiny, f"data.sampler={{type: {SAMPLER}, params: {{buckets: many}}}}", cwd=place, code=2)
    assert "data.sampler.params.buckets" in bad.err


def weighted(dataset, batch_size, num_replicas, rank, seed):
    """Draws later samples more often, from torch's global generator."""
    return WeightedRandomSampler(range(1, len(dataset) + 1), len(dataset))


def test_any_sampler_of_torchs_may_order_the_training(fit):
    """A sampler from a user's function draws by seed and epoch, and its samples are divided among processes."""
    fitted = fit("data.sampler={type: test_buckets.weighted}", "train.num_epochs=1")
    sampler = fitted.trainer.train_dataloader.sampler
    assert isinstance(sampler, SampledBatches)
    assert isinstance(sampler.sampler, WeightedRandomSampler)
    first, again = list(sampler), list(sampler)
    assert first == again
    sampler.set_epoch(1)
    assert list(sampler) != first
    parts = [SampledBatches(sampler.sampler, 8, num_replicas=2, rank=rank, seed=7) for rank in range(2)]
    steps = [[row for pair in zip(*both, strict=False) for row in pair] for both in zip(*parts, strict=True)]
    assert steps[0] == first[0]
    assert fitted.trainer.global_step == 9


def test_a_function_gets_the_samples_of_a_set_of_tuples():
    """A sort function gets each sample in the form of the user's dataset."""
    pairs = [(torch.ones(1 + n % 9), n % 2) for n in range(18)]
    found = sort_values(_Batches(pairs, default_collate), lambda pair: len(pair[0]), batched=True)
    assert found.tolist() == [1 + n % 9 for n in range(18)]


class Broken(Dataset):
    """A user's set whose samples raise an error."""

    def __len__(self):
        return 4

    def __getitem__(self, position):
        raise self.error


@pytest.mark.parametrize("error", [ValueError("of the user"), KeyError("width")])
def test_an_error_of_the_users_set_is_not_converted(error):
    """An exception from a user's set stays what it is, and is no fault of a key of the config."""
    broken = Broken()
    broken.error = error
    cfg = SimpleNamespace(seed=1, data=SimpleNamespace(batch_size=2, sampler=None))
    cfg.data.sampler = Target(type=SAMPLER, params={"buckets": 2, "sort_key": "length"})
    for call in (lambda: sort_values(broken, "length"), lambda: train_sampler(cfg, broken)):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error

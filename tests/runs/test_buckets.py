"""The bucketed sampler: the table of lengths, what it refuses, its order, and what another of its kind got wrong."""

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import digest
from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, default_collate

from deeplightning.config.schema import Target
from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.of_datasets import _Batches
from deeplightning.data.samplers import BucketedDistributedSampler, SampledBatches, sort_values, train_sampler

SAMPLER = "deeplightning.data.samplers.BucketedDistributedSampler"
BUCKETED = f"data.sampler={{type: {SAMPLER}, params: {{buckets: 2, sort_key: labels, min_samples_per_bucket: 60}}}}"


def ranks(size, buckets, batch_size, world, sizes=None, epoch=0, **options):
    """The sampler of each rank, of samples in order of size unless `sizes` says otherwise."""
    order = np.arange(size) if sizes is None else np.argsort(sizes, kind="stable")
    made = []
    for rank in range(world):
        with warnings.catch_warnings(action="ignore"):
            sampler = BucketedDistributedSampler(
                range(size), buckets, batch_size, order, num_replicas=world, rank=rank, **options
            )
        sampler.set_epoch(epoch)
        made.append(sampler)
    return made


def mixed(samplers, buckets) -> tuple[int, int]:
    """How many batches of all ranks hold samples of several buckets, and how many batches there are."""
    of = np.empty(sum(map(len, buckets)), dtype=int)
    for number, bucket in enumerate(buckets):
        of[bucket] = number
    batches = [of[list(s)].reshape(-1, s.batch_size) for s in samplers]
    flat = np.concatenate(batches)
    return int((flat.min(1) != flat.max(1)).sum()), len(flat)


def cut(size: int, buckets: int) -> list[list[int]]:
    """0 … size - 1 in so many parts, the first ones one longer: computed another way than with numpy."""
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
    """The table: samples per rank, how many never come, how many come twice, and none more often; which batches mix.
    Positions are `int`, not one of numpy's, which JSON and some datasets do not take."""
    size, buckets, _, world = shape
    samplers = ranks(*shape, shuffle=shuffle, **options)
    assert [len(s) for s in samplers] == [len(list(s)) for s in samplers] == [length] * world
    seen = Counter(position for s in samplers for position in s)
    assert {*map(type, seen)} == {int}
    assert size - len(seen) == lost
    assert sum(seen.values()) - len(seen) == repeated
    assert max(seen.values()) == (2 if repeated else 1)
    if not shuffle or not of_several:
        assert mixed(samplers, cut(size, buckets))[0] == of_several
    assert mixed(samplers, cut(size, buckets))[1] == length * world // shape[2]


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1001, 4, 8, 4), {"drop_last": True}, r"leaves out 105 of 1001 samples in each epoch; use fewer"),
        ((410, 4, 51, 2), {}, r"406 of 410 samples, which repeat"),
    ],
)
def test_what_is_lost_or_doubled_is_said(shape, options, words):
    """Where a twentieth or more is left out or repeated, a warning says how much; without it there is none."""
    size, buckets, batch_size, world = shape
    with pytest.warns(UserWarning, match=words):
        BucketedDistributedSampler(range(size), buckets, batch_size, range(size), num_replicas=world, rank=0, **options)
    with warnings.catch_warnings(action="error"):
        BucketedDistributedSampler(range(1010), 2, 10, range(1010), num_replicas=2, rank=0, **options)


def test_all_ranks_draw_from_the_same_bucket_at_each_step():
    """1,000 samples in 5 buckets, batch 10, 2 ranks: at 50 of 50 steps; each sample once."""
    sizes = np.random.RandomState(3).permutation(1000)
    steps = zip(*(np.array(list(s)).reshape(-1, 10) for s in ranks(1000, 5, 10, 2, sizes)), strict=True)
    buckets = [{*(sizes[np.concatenate(both)] // 200)} for both in steps]
    assert len(buckets) == 50
    assert all(len(found) == 1 for found in buckets)
    assert len({found.pop() for found in buckets[:10]}) > 1, "the slices are in no order of size"


def test_a_bucket_is_filled_up_from_its_own_start():
    """505 samples of a bucket need 15 more for 26 slices of 20: its first ones. Ranks take every second element."""
    first, second = (list(s) for s in ranks(1010, 2, 10, 2, shuffle=False))
    whole = [position for pair in zip(first, second, strict=True) for position in pair]
    assert whole == [*range(505), *range(15), *range(505, 1010), *range(505, 520)]


def test_both_permutations_change_with_the_epoch_and_seed_and_with_nothing_else():
    """Which samples stand together, and which bucket a step draws from, differ between epochs and seeds; not between
    two samplers of the same."""

    def looked_at(epoch, seed):
        sampler = ranks(400, 4, 10, 1, epoch=epoch, seed=seed)[0]
        steps = np.array(list(sampler)).reshape(-1, 10)
        return steps.tobytes(), (steps[:, 0] // 100).tobytes(), sorted(map(sorted, steps.tolist()))

    found = [looked_at(*key) for key in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert found[0] == looked_at(0, 0)
    for part in range(3):
        values = [each[part] for each in found]
        assert all(a != b for number, a in enumerate(values) for b in values[:number])


def test_the_order_is_frozen():
    """The order of seed 42 today is that of any later version."""
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
def test_what_cannot_be_is_refused_in_words(shape, options, words):
    """Too small buckets, and arguments that mean nothing."""
    with pytest.raises(ValueError, match=words):
        ranks(*shape, **options)


# What another sampler of this kind got wrong


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
    """Too short, too long, a position twice, from 1 on, or no whole numbers."""
    with pytest.raises(ValueError, match=words):
        BucketedDistributedSampler(range(1000), 2, 10, order)


def test_lightning_and_our_loaders_take_it_as_it_is(job, tmp_path):
    """Under ddp each process sees its own share, shared out once: the union is every sample, those that fill the
    buckets up twice, and each step draws from one bucket."""
    saw = f"train.callbacks=[{{type: own.Saw, params: {{folder: '{tmp_path}', column: index}}}}]"
    job(BUCKETED, saw, "data.batch_size=8")
    saw = [json.loads((tmp_path / f"saw_{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):  # 134 samples, 67 a bucket: 5 slices of 16, so 26 fill up
        steps = list(zip(*(of_rank[epoch] for of_rank in saw), strict=True))
        assert len(steps) == 10
        assert {len(batch) for both in steps for batch in both} == {8}
        seen = Counter(position for both in steps for batch in both for position in batch)
        assert sorted(seen) == list(range(134))
        assert Counter(seen.values()) == {1: 108, 2: 26}
    assert saw[0][0] != saw[0][1]


def test_the_two_permutations_have_a_stream_each():
    """Which slice comes when does not repeat how elements were permuted, where there are as many of both."""
    sampler = ranks(100, 1, 1, 1)[0]
    by_slices = np.array(list(sampler))
    inside = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([0, 0], spawn_key=(0,)))).permutation(100)
    slices = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([0, 0], spawn_key=(1,)))).permutation(100)
    assert by_slices.tolist() == inside[slices].tolist()
    assert inside.tolist() != slices.tolist()


def differ():
    """One of two processes, the second of which has sorted the other way round."""
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", world_size=2, rank=rank)
    same = BucketedDistributedSampler(range(400), 2, 10, range(400))
    assert (same.num_replicas, same.rank, len(list(same))) == (2, rank, 200)
    other = BucketedDistributedSampler(range(400), 2, 10, range(400)[:: -1 if rank else 1])
    with pytest.raises(ValueError, match="the processes 1 have other buckets than process 0"):
        list(other)
    print("noticed")


def test_ranks_with_different_orders_are_noticed(command, tmp_path):
    """Two processes that sorted differently are both notified in their first iteration; rank and world size are
    those of torch's group."""
    outcome = command(cwd=tmp_path, ranks=2, main="test_buckets:differ")
    assert [rank.out for rank in outcome.ranks] == ["noticed\n"] * 2, outcome


@pytest.mark.parametrize("shuffle", [True, False])
def test_iterating_changes_nothing(shuffle):
    """Twice the same, whether shuffled or not, and what the object holds stays as it was."""
    sampler = ranks(1003, 3, 7, 3, drop_last=True, allow_bucket_overlap=True, shuffle=shuffle)[1]
    before = [bucket.copy() for bucket in sampler._buckets]
    assert list(sampler) == list(sampler)
    assert all(np.array_equal(a, b) for a, b in zip(before, sampler._buckets, strict=True))


def test_nothing_optional_is_imported():
    """Torch and numpy, and nothing that a data set or an engine needs."""
    program = "import sys, deeplightning.data.samplers; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    absent = {"pytorch_lightning", "deepspeed", "horovod", "sklearn", "mlflow", "PIL", "transformers", "torchvision"}
    assert not absent & set(done.stdout.split())


def test_one_process_needs_not_be_told_and_goes_on_inside_an_epoch():
    """Without a process group it is rank 0 of 1; `start` leaves out batches of this epoch and none of the next."""
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
def test_a_run_goes_on_inside_an_epoch_and_at_its_end_bit_for_bit(sampler, steps, train):
    """Stopped in the first epoch, or at its end, and resumed: the weights of an uninterrupted run."""
    settings = [sampler, "logger.log_every_n_steps=100"]
    whole = train(*settings).folder
    first = train(*settings, "~train.num_epochs", f"train.max_steps={steps}").folder
    resumed = train(*settings, f"train.resume_ckpt='{first}'").folder
    assert digest(resumed / "last.ckpt") == digest(whole / "last.ckpt")


def test_limits_can_be_warnings():
    """Fewer than two slices, or than min_samples_per_bucket samples: a warning where it is asked for."""
    for shape, options, words in (
        ((202, 2, 100), {"drop_last": True}, "fewer than two steps take"),
        ((198, 2, 10), {}, "fewer than min_samples_per_bucket=100; use fewer buckets"),
    ):
        options["on_small_bucket"] = "warn"
        with pytest.warns(UserWarning, match=words):
            BucketedDistributedSampler(range(shape[0]), *shape[1:], range(shape[0]), **options)
    with warnings.catch_warnings(action="error"):
        BucketedDistributedSampler(range(198), 2, 10, range(198), min_samples_per_bucket=99)


# By what samples are sorted


class Sentences(Dataset):
    """Texts of one to nine words, and a column that says how many."""

    def __init__(self):
        self.texts = ["word " * (1 + number * 7 % 9) for number in range(900)]
        self.words = torch.tensor([len(text.split()) for text in self.texts])

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, position):
        return {"text": self.texts[position], "tokens": torch.ones(len(self.texts[position].split()))}


def test_samples_are_sorted_by_a_column_a_key_or_a_function():
    """An attribute of the set, a key of its samples, or what a function says of each; of a text its length.
    Batches of as many buckets as there are lengths need no padding."""
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


# In a run


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("{buckets: 2, sort_key: length}", "data.sampler.params.sort_key 'length': the training set (InMemory) has no"),
        ("{buckets: 99, sort_key: labels}", "fewer than a step takes: 16 (batch_size 16 x 1 process(es))"),
        ("{buckets: 1}", "give sort_key, which to sort the samples by, or sorted_idx"),
        ("{buckets: 2, sort_key: labels, batch_size: 3}", "data.sampler.params.batch_size cannot be set"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_before_a_run(sampler, words, train, store):
    """One note, exit code 2, and no run."""
    before = [*store.glob("*/*")]
    outcome = train(f"data.sampler={{type: {SAMPLER}, params: {sampler}}}", code=2)
    assert words in outcome.err
    assert outcome.err.count("error: ") == 1
    assert [*store.glob("*/*")] == before


def test_data_that_can_only_be_read_are_refused():
    """A set without a length has no buckets."""

    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="with a length, which Endless lacks"):
        BucketedDistributedSampler(Endless(), 2, 10, sort_key="words")
    cfg = SimpleNamespace(seed=1, data=SimpleNamespace(batch_size=4, sampler=Target(type=SAMPLER)))
    with pytest.raises(DataConfigError, match=r"data\.sampler needs a training set with a length, not Endless"):
        train_sampler(cfg, Endless())


def test_check_knows_what_the_run_gives(command, tiny, place):
    """`check` asks for neither the set nor what comes from the run, and compares the rest."""
    good = f"data.sampler={{type: {SAMPLER}, params: {{buckets: 2, sort_key: {{ref: own.schedule}}}}}}"
    command("check", tiny, good, cwd=place, code=0)
    bad = command("check", tiny, f"data.sampler={{type: {SAMPLER}, params: {{buckets: many}}}}", cwd=place, code=2)
    assert "data.sampler.params.buckets" in bad.err


def weighted(dataset, batch_size, num_replicas, rank, seed):
    """Draws later samples more often, from torch's global generator."""
    return WeightedRandomSampler(range(1, len(dataset) + 1), len(dataset))


def test_any_sampler_of_torchs_may_order_the_training(fit):
    """A function of the user's gives one that draws from torch's random numbers: in each epoch the same in every run,
    another in the next, and shared out over processes."""
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
    """As the user's own set has them."""
    pairs = [(torch.ones(1 + n % 9), n % 2) for n in range(18)]
    found = sort_values(_Batches(pairs, default_collate), lambda pair: len(pair[0]), batched=True)
    assert found.tolist() == [1 + n % 9 for n in range(18)]

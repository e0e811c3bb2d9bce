"""`ArraySpec` turns an array of numbers into a network's input and refuses arrays of another shape."""

import io
import struct
import wave

import numpy as np
import pytest

from deeplightning.array_spec import ArrayError, ArraySpec, read_npy, read_signal
from deeplightning.run.inputs import inputs_of
from deeplightning.table_format import rows_of_csv

SPEC = ArraySpec((2, 3), (1.0, 10.0), (2.0, 5.0))


def npy(array):
    """Return the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_each_channel_is_brought_to_numbers_around_zero():
    """Nested lists, an array and the bytes of a file give the same result; mean and deviation may be one number."""
    lists = [[1, 3, 5], [10, 15, 20]]
    expected = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    for given in (lists, np.array(lists), np.array(lists, np.int16), npy(np.array(lists, np.float64))):
        prepared = SPEC.prepare(given)
        assert (prepared.tolist(), prepared.dtype) == (expected, np.float32)
    assert ArraySpec((3,), (1.0,), (2.0,)).prepare([1, 3, 5]).tolist() == [0.0, 1.0, 2.0]
    assert ArraySpec((3,)).prepare([1, 3, 5]).tolist() == [1.0, 3.0, 5.0]
    assert SPEC.scaled(np.array([lists, lists])).tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("given", "words", "status"),
    [
        ([[1, 2], [3, 4]], "the shape 2 x 2, not 2 x 3", 400),
        (3, "the shape no dimension, not 2 x 3", 400),
        ([[1, 2, 3], [4, 5]], "of the same length at each level", 400),
        ([["a", 2, 3], [4, 5, 6]], "numbers only", 400),
        ([[None, 2, 3], [4, 5, 6]], "numbers only", 400),
        ([[1, 2, 3], [4, float("nan"), 6]], r"The number at \[1, 1\] is nan", 400),
        ([[1, 2, 3], [4, 1e300, 6]], r"The number at \[1, 1\] is 1e\+300", 400),
        (b"\x89PNG", "not an array in numpy's format", 415),
        (npy(np.zeros((2, 3), np.complex64)), "complex64, and not numbers", 400),
        (npy(np.array([[object()]], object)), "object, and not numbers", 400),
        (npy(np.zeros((2, 3)))[:-1], "is cut off, or its header cannot be read", 400),
        (npy(np.zeros((2, 3)))[:40], "is cut off, or its header cannot be read", 400),
        (npy(np.zeros((2, 3))) + b"\0", "fewer or more numbers than its header says", 400),
    ],
)
def test_what_is_no_such_array_is_refused(given, words, status):
    """The error says what is wrong and has the matching HTTP status."""
    with pytest.raises(ArrayError, match=words) as caught:
        SPEC.prepare(given)
    assert caught.value.status == status


def test_arrays_of_another_length_are_cut_or_filled_where_the_spec_says_so():
    """Zeros are appended before scaling, as in training; the other dimensions must match."""
    spec = ArraySpec((2, 3), (1.0,), (2.0,), takes_any_length=True)
    for given, expected in (
        ([[1, 3, 5, 7], [1, 1, 1, 1]], [[0, 1, 2], [0, 0, 0]]),
        ([[3], [5]], [[1, -0.5, -0.5], [2, -0.5, -0.5]]),
    ):
        assert spec.prepare(given).tolist() == spec.prepare(npy(np.array(given))).tolist() == expected
    for given in (np.zeros((2, 0)), np.zeros((3, 3)), np.zeros(3), np.zeros((10**6, 1)), np.zeros((2, 2, 3))):
        with pytest.raises(ArrayError, match=f"the shape {' x '.join(map(str, given.shape))}, not 2 x 3"):
            spec.prepare(given)
    assert ArraySpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i2", "|u1", "|b1", "<f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_file_is_read_as_numpy_reads_it(dtype, order):
    """`read_npy` agrees with numpy for any byte order and memory layout."""
    array = np.asarray(np.arange(24).reshape(2, 3, 4) % 2, dtype=dtype, order=order)
    found = read_npy(npy(array))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


def test_a_file_that_announces_more_than_it_has_takes_no_memory():
    """A header that announces 10^15 numbers or is malformed is refused."""
    head = npy(np.zeros(1))[:128]
    for text in (b"(1000000000000000,)", b"(-1,)", b"('a',)", b"[1]", b"(1.5,)", b"1"):
        for given in (head.replace(b"(1,)", text), head.replace(b"{", b"[")):
            with pytest.raises(ArrayError):
                read_npy(given + b"\0" * 8)


def test_nan_and_inf_in_the_first_line_are_data(tmp_path):
    """`nan` and `inf` do not make a header: a signal keeps its first step, and a table the header above such a row."""
    path = tmp_path / "a.csv"
    for text, steps in (("nan,1\n2,inf\n", 2), ("left,right\nnan,1\n", 1)):
        path.write_text(text)
        assert read_signal(path).shape == (2, steps)
    assert [*rows_of_csv("# a,b\nnan,nan\n1,2\n")[1]] == ["# a", "b"]


def test_a_csv_file_of_a_signal_is_read_as_it_comes(tmp_path):
    """Empty last lines and a header in any encoding are accepted; an error about a missing number names its line."""
    path = tmp_path / "a.csv"
    for data in ("Zeit;µV\n1,5;2\n\n".encode("cp1252"), "t\tµV\n1,5\t2\n".encode("utf-16"), b"1.5 2\n \n"):
        path.write_bytes(data)
        assert read_signal(path).tolist() == [[1.5], [2]]
    for text, line in (
        ("x,y\n1,2\n,3\n", "line 3, ',3',"),
        (",3\n1,2\n", "line 1, ',3',"),
        ("1,2\n3\n", "line 2, '3',"),
    ):
        path.write_text(text)
        with pytest.raises(ArrayError, match=f"{line} must have a number for each channel"):
            read_signal(path)


def test_decimal_commas_below_one_name_are_no_two_channels(tmp_path):
    """A column with decimal commas is not read as two channels of whole numbers, unless the header has two names."""
    path = tmp_path / "a.csv"
    path.write_text("mV\n0,125\n-1,5\n")
    with pytest.raises(ArrayError, match=r"'mV' is one column, line 2 has two values; write 0\.5 for 0,5"):
        read_signal(path)
    path.write_text("mV,µV\n0,125\n")
    assert read_signal(path).tolist() == [[0], [125]]


def test_a_spec_travels_as_plain_types():
    """`from_dict` restores what `to_dict` returns, and refuses invalid values with the reason."""
    assert ArraySpec.from_dict(SPEC.to_dict()) == SPEC
    for change, words in (
        ({"shape": []}, "shape must be one or more whole numbers"),
        ({"shape": [2, 0]}, "shape must be one or more whole numbers"),
        ({"mean": [1.0, 2.0, 3.0]}, "mean must be 1 or 2 finite numbers"),
        ({"std": [0.0]}, "std must be positive"),
        ({"std": ["1"]}, "std must be 1 or 2 finite numbers"),
        ({"new": 1}, "look at new"),
    ):
        with pytest.raises(ValueError, match=words):
            ArraySpec.from_dict(SPEC.to_dict() | change)


def test_a_signal_of_one_channel_needs_no_dimension_for_it():
    """(T,) is accepted as (1, T), as in training; it is also cut or padded."""
    file = io.BytesIO()
    np.save(file, np.array([1, 2, 3]))
    for given in ([1, 2, 3], file.getvalue(), [[1, 2, 3]]):
        assert ArraySpec((1, 3)).prepare(given).tolist() == [[1, 2, 3]]
    assert ArraySpec((1, 3), takes_any_length=True).prepare([1, 2]).tolist() == [[1, 2, 0]]
    with pytest.raises(ArrayError, match="the shape no dimension, not 1"):
        ArraySpec((1,)).prepare(3)


def test_a_file_of_two_columns_is_no_array_of_one(tmp_path):
    """No column of a file is dropped: two do not fit a network that takes (T,), one does."""
    (tmp_path / "a.csv").write_text("nm,intensity\n400,1\n500,2\n600,3\n")
    (tmp_path / "b.csv").write_text("intensity\n1\n2\n3\n")
    ((_, two),), ((_, one),) = (inputs_of(tmp_path / name, "array", ArraySpec((3,))) for name in ("a.csv", "b.csv"))
    with pytest.raises(ArrayError, match="the shape 2 x 3, not 3"):
        ArraySpec((3,)).prepare(two)
    assert ArraySpec((3,)).prepare(one).tolist() == [1, 2, 3]


def test_a_wav_file_that_is_cut_off_is_refused(tmp_path):
    """Also between two samples, where the rest would be filled with zeros."""
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\1\0" * 1000)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ArrayError, match=r"cut off: the file has 1,000 of 2,000 bytes"):
        read_signal(path)


def test_an_extensible_wav_file_is_read(tmp_path):
    """Tools write this header for more than 16 bits, two channels or 48 kHz; Python 3.11 does not know it."""
    kind = bytes.fromhex("0100000000001000800000aa00389b71")  # PCM
    head = struct.pack("<HHLLHHHHL", 0xFFFE, 1, 96000, 288000, 3, 24, 22, 24, 4) + kind
    body = b"WAVEfmt " + struct.pack("<L", 40) + head + b"data" + struct.pack("<L", 6) + b"\0\0\x40\0\0\xc0"
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF" + struct.pack("<L", len(body)) + body)
    assert read_signal(path).tolist() == [[0.5, -0.5]]

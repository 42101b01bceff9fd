"""CSV tables: numbers are read as they are, anything else is named by line, column and value."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.readers import mean_and_scale, read_csv, standardize
from samestep.errors import DataError, UsageError

numbers = st.floats(-1e6, 1e6, width=32)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "table.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=10), st.booleans())
def test_what_is_written_is_read_with_or_without_a_header(tmp_path_factory, rows, header):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text("a,b,c\n" * header + "".join(",".join(map(repr, row)) + "\n" for row in rows))
    table = read_csv(path)
    assert table.features.tolist() == [list(row[:2]) for row in rows]
    assert table.target.tolist() == [[row[2]] for row in rows]
    assert table.features.dtype == table.target.dtype == torch.float32
    assert table.names == (("a", "b") if header else ("column 1", "column 2"))


def test_quotes_blank_lines_windows_line_ends_and_a_byte_order_mark_are_read(write):
    table = read_csv(write('\ufeff"size, m2"," rooms ",price\r\n"1.5","2",3e2\r\n\r\n 4 ,5,6\r\n'))
    assert table.names == ("size, m2", "rooms")
    assert table.features.tolist() == [[1.5, 2], [4, 5]]
    assert table.target.tolist() == [[300], [6]]


@pytest.mark.parametrize(
    ("target", "values"), [("b", [2, 5]), (1, [2, 5]), (-2, [2, 5]), ("1", [2, 5]), (None, [3, 6])]
)
def test_the_target_is_chosen_by_name_or_index_and_is_the_last_by_default(write, target, values):
    table = read_csv(write("a,b,c\n1,2,3\n4,5,6"), target)
    assert table.target.flatten().tolist() == values
    assert sorted(table.features[0].tolist() + table.target[0].tolist()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("target", "count"), [("d", "0 columns 'd'"), (3, "0 columns 3"), (-5, "0 columns -5"), ("a", "2 columns 'a'")]
)
def test_a_target_that_is_not_one_column_is_refused_with_the_columns_there_are(write, target, count):
    with pytest.raises(UsageError, match=f"has {count} to be the target; needed: .*, of a, b, a"):
        read_csv(write("a,b,a\n1,2,3"), target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "has 0 rows of numbers in 0 columns"),
        ("a,b\n", "has 0 rows of numbers in 2 columns"),
        ("a\n1\n", "has 1 row of numbers in 1 column"),
        ("a;b\n1;2\n", "in 1 column; needed: a row or more, a feature and a target, separated by commas"),
        ("a,b\n1,2\n3,x\n", "line 3, column 'b': the value 'x' is no finite number of float32"),
        ("a,b\n1,2\n,4\n", "line 3, column 'a': the value '' is no"),
        ("a,b\n1, \n", "line 2, column 'b': the value '' is no"),
        ("a,b\n1,NA\n", "the value 'NA' is no"),
        ("a,b\n1_000,2\n", "the value '1_000' is no"),
        ("a,b\n1,nan\n", "line 2, column 'b': the value 'nan' is no"),
        ("a,b\n-inf,1\n", "the value '-inf' is no"),
        ("a,b\n1,2\n1,1e39\n", "line 3, column 'b': the value '1e39' is no"),
        ("1,2\n3,x\n", "line 2, column 2: the value 'x' is no"),
        ("a,2\n3,4\n", "line 1, column 1: the value 'a' is no"),
        ("a,b\n1,2,3\n", "line 2: has 3 values; the first line has 2"),
        ("a,b\n\n1\n", "line 3: has 1 values; the first line has 2"),
        ('a,b\n"1,2\n', "after line 1: unexpected end of data"),
        (b"a,b\n\xff\xfe,1\n", "byte 0xff in position 4: invalid start byte"),
    ],
)
def test_a_table_that_is_no_table_is_named_with_line_column_and_value(write, text, message):
    path = write(text)
    with pytest.raises(DataError, match=message) as caught:
        read_csv(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.csv: there is no such file; a CSV file \(--data\) is needed"):
        read_csv(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_csv(tmp_path)


@given(st.lists(numbers, min_size=2, max_size=30))
def test_mean_and_deviation_are_those_of_exact_arithmetic(column):
    mean, scale = (float(value) for value in mean_and_scale(torch.tensor(column).unsqueeze(1)))
    assert mean == (column[0] if len(set(column)) == 1 else math.fsum(column) / len(column))
    exact = statistics.pstdev(column)
    # The two differ by roundings of single operations only.
    assert scale == (pytest.approx(exact, rel=1e-9) if exact else 1)


def test_standardising_looks_at_the_training_rows_alone():
    train, other = torch.tensor([[0.0, 5.0], [2.0, 5.0]]), torch.tensor([[3.0, 7.0]])
    got = standardize(train, other)
    assert got[0].tolist() == [[-1, 0], [1, 0]]
    assert got[1].tolist() == [[2, 2]]
    assert got[0].dtype == torch.float32


def test_a_constant_column_becomes_exactly_zero():
    assert standardize(torch.full((7, 1), 0.1, dtype=torch.float64))[0].eq(0).all()


def test_tables_that_do_not_fit_together_are_refused():
    with pytest.raises(DataError, match="no training rows"):
        standardize(torch.zeros(0, 2))
    with pytest.raises(DataError, match="tables of 2 columns are needed"):
        standardize(torch.zeros(3, 2), torch.zeros(3, 1))


def test_the_real_table_of_boston_has_its_13_features(shared_data):
    table = read_csv(shared_data / "boston" / "boston_housing.csv")
    assert table.features.shape == (506, 13)
    assert table.names[:3] == ("crim", "zn", "indus")
    assert table.target[0].item() == 24


def test_sums_over_columns_are_exact():
    mean, _ = mean_and_scale(torch.tensor([[1e16], [1.0], [-1e16], [3.0]], dtype=torch.float64))
    assert float(mean) == 1.0

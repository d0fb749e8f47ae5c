"""Lists of names and values in messages."""

from kfac_optim.utils.text import listed, shown


def test_a_list_says_how_many_more_there_are_only_if_there_are_more() -> None:
    assert listed("ab", most=2) == "'a', 'b'"
    assert listed("abcd", most=2) == "'a', 'b' and 2 more"


def test_of_a_long_value_the_beginning_is_shown() -> None:
    assert shown("ab", most=4) == "'ab'"
    assert shown(list(range(10)), most=5) == "[0, 1…"

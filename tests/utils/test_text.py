"""Lists of names in messages."""

from kfac_optim.utils.text import listed


def test_a_list_says_how_many_more_there_are_only_if_there_are_more() -> None:
    assert listed("ab", most=2) == "'a', 'b'"
    assert listed("abcd", most=2) == "'a', 'b' and 2 more"

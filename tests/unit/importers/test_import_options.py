from dryfit.study.import_options import FACTS, Format, ImportOptions


def test_every_option_is_read_by_some_format_or_by_the_split():
    read = {option for facts in FACTS.values() for option in facts.options}
    assert read | {"validation", "test", "split_seed"} == set(ImportOptions.__annotations__)
    assert set(FACTS) == set(Format)

import tomllib
from datetime import date

from hypothesis import given
from hypothesis import strategies as st

from dryfit.settings.study_file_problems import locate_keys, parse_key

bare = st.text("abcXYZ019_-", min_size=1, max_size=6)
odd = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=6)
names = st.one_of(bare, odd)
scalars = st.one_of(st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False), odd, st.dates())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
blank = st.sampled_from(["", "\n", '# [x] = "\n', "  # '''\n", "\r\n", "\t\n"])


def quoted(text, draw_literal):
    if draw_literal and "'" not in text:
        return f"'{text}'"
    escaped = "".join(f"\\U{ord(char):08x}" if char in '"\\' or ord(char) > 0xFFF else char for char in text)
    return f'"{escaped}"'


class Writer:
    """Writes a document in a layout drawn at random, noting the line of every path on the way."""

    def __init__(self, data):
        self.data, self.text, self.expected = data, "", {}

    def mark(self, path):
        self.expected.setdefault(path, self.text.count("\n") + 1)

    def filler(self):
        self.text += self.data.draw(blank)

    def key(self, name):
        plain = name and all(char in "abcXYZ019_-" for char in name)
        space = self.data.draw(st.sampled_from(["", " "]))
        self.text += (
            name if plain and self.data.draw(st.booleans()) else quoted(name, self.data.draw(st.booleans()))
        ) + space

    def value(self, path, value):
        match value:
            case bool():
                self.text += "true" if value else "false"
            case str():
                if self.data.draw(st.booleans()):
                    self.text += '"""\n[a]\nb = "" \\\\ \\" \'\'\' #"""'
                else:
                    self.text += quoted(value, self.data.draw(st.booleans()))
            case list():
                self.text += "["
                for index, item in enumerate(value):
                    self.filler()
                    self.mark((*path, index))
                    self.value((*path, index), item)
                    self.filler()
                    self.text += ","
                self.filler()
                self.text += "]"
            case dict():
                self.text += "{"
                for position, (name, item) in enumerate(value.items()):
                    self.text += ", " if position else " "
                    self.assignment(path, name, item)
                self.text += "}"
            case date():
                self.text += value.isoformat()
            case _:
                self.text += repr(value)

    def assignment(self, table, name, value):
        self.mark((*table, name))
        self.key(name)
        self.text += "= "
        self.value((*table, name), value)

    def table(self, path, keys, *, header):
        self.filler()
        if header:
            for size in range(1, len(path) + 1):
                self.mark(path[:size])
            names_only = [part for part in path if isinstance(part, str)]
            is_array = isinstance(path[-1], int)
            self.text += "[[" if is_array else "["
            for position, name in enumerate(names_only):
                self.text += "." if position else ""
                self.key(name)
            self.text += "]]" if is_array else "]"
            self.text += self.data.draw(st.sampled_from(["\n", " # [c]\n", "\r\n"]))
        for name, value in keys.items():
            self.assignment(path, name, value)
            self.text += "\n"
            self.filler()


def paths_of(value, path=()):
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return
    for key, item in children:
        yield (*path, key)
        yield from paths_of(item, (*path, key))


@given(
    top=st.dictionaries(names, values, max_size=3),
    tables=st.dictionaries(names, st.dictionaries(names, values, max_size=3), max_size=3),
    repeated=st.lists(st.dictionaries(names, values, max_size=2), max_size=3),
    data=st.data(),
)
def test_every_key_of_a_document_is_found_on_its_line(top, tables, repeated, data):
    writer = Writer(data)
    writer.table((), top, header=False)
    for name, keys in tables.items():
        if name not in top and name != "tables":
            writer.table((name,), keys, header=True)
            if "deep" not in keys:
                writer.table((name, "deep"), {"x": 1}, header=True)
    if "tables" not in top:
        for index, keys in enumerate(repeated):
            writer.table(("tables", index), keys, header=True)
            if "sub" not in keys:
                writer.table(("tables", index, "sub"), {"x": [1]}, header=True)
    document = tomllib.loads(writer.text)
    found = locate_keys(writer.text)
    assert set(found) == set(paths_of(document))
    assert found == writer.expected


@given(parts=st.lists(names, min_size=1, max_size=4), literal=st.booleans())
def test_a_dotted_key_is_read_as_the_parser_reads_it(parts, literal):
    text = " . ".join(quoted(part, literal) for part in parts)
    read, end = parse_key(f"{text} = 1")
    assert list(read) == parts
    assert f"{text} = 1"[end] == "="
    node = tomllib.loads(f"{text} = 1")
    for part in read:
        node = node[part]
    assert node == 1


def test_dotted_keys_mark_every_step():
    assert locate_keys("a.b.c = 1\na.d = 2\n[e.f]\n") == {
        ("a",): 1, ("a", "b"): 1, ("a", "b", "c"): 1, ("a", "d"): 2, ("e",): 3, ("e", "f"): 3,
    }  # fmt: skip

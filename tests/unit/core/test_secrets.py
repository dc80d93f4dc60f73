import json

import pytest

from dryfit.settings.secrets import forget_secrets, redacted, redacted_json, secrets_of, url_secrets

ENVIRONMENT = {
    "HF_TOKEN": "hf_aBcDeFgH",
    "WANDB_API_KEY": "0123456789",
    "CLIENT_SECRET": "s3cret/with spaces",
    "PGPASSWORD": "hunter22",
    "AWS_SECRET_ACCESS_KEY": "longer-hunter22-longer",
    "DEBUG_KEY": "1",
    "TOKENIZERS_PARALLELISM": "false-false",
    "KEYBOARD": "qwertz",
    "HOME": "/home/somebody",
    "MONKEY": "banana",
}
SECRET_NAMES = {"HF_TOKEN", "WANDB_API_KEY", "CLIENT_SECRET", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "DEBUG_KEY"}


def test_names_tell_secrets():
    assert set(secrets_of(ENVIRONMENT)) == SECRET_NAMES


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("401 with hf_aBcDeFgH at once", "401 with <HF_TOKEN> at once"),
        ("longer-hunter22-longer and hunter22", "<AWS_SECRET_ACCESS_KEY> and <PGPASSWORD>"),
        ("?q=s3cret%2Fwith%20spaces", "?q=<CLIENT_SECRET>"),
        ("1 of 1 in /home/somebody", "1 of 1 in /home/somebody"),
        ("postgresql://me:p@ss:word@db:5432/x", "postgresql://me:<password>@db:5432/x"),
        ("redis://:open@cache/0", "redis://:<password>@cache/0"),
        ("https://me@host/a:b@c", "https://me@host/a:b@c"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("mysql://h/x?user=u&password=pw&ssl=1", "mysql://h/x?user=u&password=<secret>&ssl=1"),
        ("https://h/x?access_token=abc", "https://h/x?access_token=<secret>"),
        ("sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_secrets_give_way_to_their_names(text, clean):
    secrets = secrets_of(ENVIRONMENT)
    assert redacted(text, secrets) == clean
    assert redacted(clean, secrets) == clean


def test_json_keeps_its_numbers_and_keys():
    document = {"0123456789": 100123456789, "text": 'a "0123456789"', "list": ["hunter22", None, True, 0.5]}
    found = json.loads(redacted_json(json.dumps(document).encode(), secrets_of(ENVIRONMENT)))
    assert found == {
        "0123456789": 100123456789,
        "text": 'a "<WANDB_API_KEY>"',
        "list": ["<PGPASSWORD>", None, True, 0.5],
    }
    for data in (b'{"value": NaN, "text": "plain \\u00e9"}', b"{ torn hunter22", b""):
        assert redacted_json(data, secrets_of(ENVIRONMENT)) == data


def test_a_url_is_a_secret_as_a_whole_and_in_part():
    secrets = url_secrets("STORAGE", "postgresql://me:pass-word@db/x")
    said = "cannot open postgresql://me:pass-word@db/x with pass-word"
    assert redacted(said, secrets) == "cannot open <STORAGE> with <password in STORAGE>"
    assert url_secrets("STORAGE", "sqlite:///a.db") == {"STORAGE": "sqlite:///a.db"}
    assert url_secrets("STORAGE", "http://[") == {"STORAGE": "http://["}


def test_an_environment_forgets_all_but_what_is_kept():
    environment = dict(ENVIRONMENT)
    forget_secrets(environment, keep=frozenset({"HF_TOKEN"}))
    assert set(environment) == set(ENVIRONMENT) - SECRET_NAMES | {"HF_TOKEN"}

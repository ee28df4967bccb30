"""Secrets leave config and texts; what only sounds like one stays."""

import pytest

from common.scrub import REMOVED, scrub_config, scrub_text


def test_config_values_with_the_names_of_secrets_are_removed_and_counts_stay():
    config = {
        "run": {"key_file": "/etc/run.keys", "max_prompt_tokens": 64, "seed": 3},
        "api_token": "abc",
        "password": "",
        "list": [{"secret": ["x", "y"]}],
        "none": {"key_file": None},
        "url": "https://me:hunter2@host/x",
    }
    assert scrub_config(config) == {
        "run": {"key_file": REMOVED, "max_prompt_tokens": 64, "seed": 3},
        "api_token": REMOVED,
        "password": "",
        "list": [{"secret": [REMOVED, REMOVED]}],
        "none": {"key_file": None},
        "url": f"https://{REMOVED}@host/x",
    }


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_abcdefgh next",
        'env {"WANDB_API_KEY": "0123abcd4567"} next',
        r"{\"DB_PASSWORD\": \"0123abcd4567\"} next",
        "--set x.secret='hunter2hunter2' next",
        "Authorization: Bearer abcdefgh.ijkl next",
        "https://user:hunter2@host/ next",
        "the very thing itself next",
    ],
)
def test_what_is_written_like_a_secret_goes_and_the_rest_stays(text):
    scrubbed = scrub_text(text, ["the very thing itself"])
    assert REMOVED in scrubbed
    assert scrubbed.endswith(" next")
    for secret in ("hf_abcdefgh", "0123abcd4567", "hunter2", "abcdefgh.ijkl", "very thing"):
        assert secret not in scrubbed


@pytest.mark.parametrize(
    "text",
    [
        '{"generated_tokens": 12345, "event": "step"}',
        "run.max_prompt_tokens=64 is over the limit",
        "tokens: generated 12, trained 12",
        "train/num_tokens=1.5e+06",
        "limit_key='run.weight_update_timeout_s'",
        "tcp://127.0.0.1:5710",
    ],
)
def test_counts_and_plain_words_stay(text):
    assert scrub_text(text) == text


@pytest.mark.parametrize("text", ["x" * 300_000, "a-" * 150_000, "a:" * 150_000, "token" * 60_000])
def test_no_text_takes_long(text):
    assert scrub_text(text) == text

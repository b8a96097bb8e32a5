# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` over HTTP with continuous batching, against generate() with eager attention, one by one."""

import json
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_continuous_batching import LENGTHS, ROWS, STEPS, one_by_one, prompts_of
from test_models import model_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

WORDS = 256  # tokens of the model, none of which is special: each is a word of an answer
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_serve_available(), reason="the server needs requirements-long.txt"),
]


def text_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


def tokens_of(text):
    return [int(word.removeprefix("w")) for word in text.split()]


def save_tokenizer(folder):
    vocabulary = [*(f"w{token}" for token in range(WORDS)), "<unknown>", "<padding>"]
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unknown>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(unk_token="<unknown>", pad_token="<padding>", chat_template=TEMPLATE)
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)


@pytest.fixture
def serve(tmp_path):
    """serve(model, attention) begins to serve the model, and returns its address and the model that is served."""
    from transformers.cli.serve import Serve

    servers = []

    def start(model, attention):
        model.generation_config.eos_token_id = None  # answers have all of their tokens
        model.save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = dict(device="cpu", dtype="float32", host="127.0.0.1", port=port, non_blocking=True)
        batching = dict(cb_num_blocks=64, cb_max_batch_tokens=ROWS)
        servers.append(
            Serve(str(tmp_path), continuous_batching=True, attn_implementation=attention, **batching, **place)
        )
        for _ in range(600):
            if servers[-1].server.started:
                break
            time.sleep(0.1)
        (loaded,) = servers[-1]._model_manager.loaded_models.values()
        return f"http://127.0.0.1:{port}", loaded.model

    yield start
    for server in servers:
        server.kill_server()


def ask(address, model, prompt, stream=False):
    """The tokens of an answer to one user's message."""
    messages = [{"role": "user", "content": text_of(prompt)}]
    body = dict(model=model, messages=messages, max_tokens=STEPS, temperature=0, stream=stream)
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        if not stream:
            return tokens_of(json.load(response)["choices"][0]["message"]["content"])
        lines = [line.decode().removeprefix("data: ") for line in response if line.startswith(b"data: {")]
    return tokens_of("".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_answers(name, attention, serve):
    """All requests at once, prompts longer than a step among them; whole answers, then streamed ones."""
    model, prompts = model_of(name), prompts_of(LENGTHS)
    address, served = serve(model, attention)
    with ThreadPoolExecutor(len(prompts)) as pool:
        for stream in (False, True):
            got = list(pool.map(lambda prompt, s=stream: ask(address, served.name_or_path, prompt, s), prompts))
            assert served.config._attn_implementation == f"{attention}_paged"
            assert got == one_by_one(model, prompts)


def test_names_that_are_not_registered_are_refused(attention, serve):
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'another'"):
        serve(model_of("llama"), "another")

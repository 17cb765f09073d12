"""A small HTTP server that completes prompts with a real engine; it speaks as much of OpenAI's interface as needed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from fliptrace.capture.decoding import generate
from fliptrace.pair import encode_prompt
from fliptrace.pair.recording import set_reduction
from fliptrace.studies.decide import decision


class ModelServer:
    """Serves an engine under a reduction; a context. Every request takes the next schedule seed."""

    def __init__(self, engine, reduction, *, vllm=True, with_logprobs=True, decides=True):
        self.requests = 0
        served = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                """Quiet."""

            def do_GET(self):
                if self.path == "/v1/models":
                    self._send(200, {"data": [{"id": "base"}, {"id": "tuned"}]})
                elif self.path == "/version" and vllm:
                    self._send(200, {"version": "0.0-test"})
                else:
                    self._send(404, {"error": "nothing here"})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ids = asked.pop("return_tokens_as_token_ids", None)
                if ids and not vllm:
                    self._send(400, {"error": "unknown field return_tokens_as_token_ids"})
                    return
                if self.path == "/v1/systemone" and not decides:
                    self._send(501, {"error": "The model does not support it"})
                    return
                served.requests += 1
                set_reduction(engine, reduction, served.requests)
                if self.path == "/v1/systemone":
                    self._send(200, decide(engine, asked))
                    return
                self._send(200, complete(engine, asked, ids, with_logprobs))

            def _send(self, code, document):
                body = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def decide(engine, asked):
    """Answer one noul question as vLLM's interface does, from the next token's logits."""
    ((name, question),) = asked["questions"].items()
    prompt = encode_prompt(
        engine.tokenizer, f"{asked['state']}\n\nQuestion: {question['instructions']}"
    )
    engine.start(prompt.ids)
    words = [
        engine.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("yes", "no")
    ]
    yes, no, mass = decision(engine.step(), *words)
    return {
        "answers": {name: {"type": question["type"], "probabilities": {"yes": yes, "no": no}}},
        "diagnostics": {name: {"label_mass": mass}},
        "usage": {"input_tokens": len(prompt.ids)},
    }


def complete(engine, asked, ids, with_logprobs):
    """Complete greedily and say the log-probabilities of the best tokens."""
    chosen, top = [], []

    def name(token):
        return (
            f"token_id:{token}" if ids else engine.text_of((token,), special=True) or f"<{token}>"
        )

    def on_choice(_, choice, logits):
        logs = torch.log_softmax(logits.float(), 0)
        values, tokens = logs.topk(asked["logprobs"])
        chosen.append(float(logs[choice.token]))
        top.append(
            {name(int(token)): float(value) for value, token in zip(values, tokens, strict=True)}
        )

    prompt = encode_prompt(engine.tokenizer, asked["prompt"], chat_template=False)
    made = generate(
        engine,
        prompt.ids,
        max_new_tokens=asked["max_tokens"],
        end_ids=engine.end_ids,
        on_choice=on_choice,
    )
    said = {
        "tokens": [name(token) for token in made.token_ids],
        "token_logprobs": chosen,
        "top_logprobs": top,
    }
    return {
        "choices": [
            {"text": engine.text_of(made.token_ids), "logprobs": said if with_logprobs else None}
        ]
    }


@contextlib.contextmanager
def vllm_server(model, adapter, log):
    """Start vLLM's own server with an adapter named tuned; give its address; end it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", "base", "--enable-lora", "--max-lora-rank", "16"),
        *("--lora-modules", f"tuned={adapter}", "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "2"),
    ]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        for _ in range(150):
            time.sleep(1)
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                continue
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)

"""A small HTTP server that completes prompts with a real engine; it speaks as much of OpenAI's interface as needed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from fliptrace.capture.decoding import generate
from fliptrace.pair import encode_prompt
from fliptrace.pair.recording import set_reduction


class ModelServer:
    """Serves an engine under a reduction; a context. Every request takes the next schedule seed."""

    def __init__(self, engine, reduction, *, vllm=True, with_logprobs=True):
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
                served.requests += 1
                set_reduction(engine, reduction, served.requests)
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

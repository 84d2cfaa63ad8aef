"""A server that reads its weights when it starts: ``python small_restarted.py PATH PORT``."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from safetensors.numpy import load_file

VALUE = float(load_file(f"{sys.argv[1]}/model.safetensors")["value"][0])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"value": VALUE, "pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()

"""Start the server, ask it through the `openai` client, and stop it."""

import os
import subprocess
import sys
import time

import httpx
from openai import OpenAI

MODEL = os.environ.get("CHAIRLIFT_EXAMPLE_MODEL", "smollm2-135m")
PORT = os.environ.get("CHAIRLIFT_EXAMPLE_PORT", "8321")
URL = f"http://127.0.0.1:{PORT}"


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"{URL}/health").status_code == 200:
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not start")


server = subprocess.Popen([sys.executable, "-m", "chairlift", "serve", MODEL, "--port", PORT, "--quiet"])
try:
    wait_until_ready(server)
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Name three mountains."}],
        temperature=0,
        max_tokens=32,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()
    server.wait()

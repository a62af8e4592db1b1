"""``python -m grpo_exp.rollout.vllm_serve``: a vLLM server that ends with the process that started it.

vLLM starts its engine core and workers by importing this module again in each of them (multiprocessing's spawn), so the line
below the imports ties every process of the server to its parent: a SIGKILL of any of them leaves nothing behind.
"""

import os
import runpy
import secrets
from typing import TYPE_CHECKING, Any

from .process import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

die_with_parent()

TOKEN = "GRPO_EXP_SERVER_TOKEN"
PARENT = "GRPO_EXP_SERVER_PARENT"


async def require_token(request: Any, call_next: "Callable[[Any], Awaitable[Any]]") -> Any:
    """Middleware: nobody else on this machine may use the server. vLLM's own key leaves its control paths open."""
    given = request.headers.get("authorization", "")
    if secrets.compare_digest(given.encode(), f"Bearer {os.environ[TOKEN]}".encode()):
        return await call_next(request)
    from starlette.responses import JSONResponse

    return JSONResponse({"error": "a token is needed"}, status_code=401)


def main() -> None:
    if os.getppid() != int(os.environ[PARENT]):  # it ended before it could take this process with it
        return
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()

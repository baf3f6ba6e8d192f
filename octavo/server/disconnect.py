"""An ASGI handler is not cancelled when its client leaves: somebody has to listen for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from octavo.server.responses import Receive


async def run_while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run `work` until it is done, or cancel it when the client leaves. False if the client left.

    The body must have been read: from then on `receive` has only the disconnect to tell. What `work` raises is raised.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        # Also on our own cancellation: the generation behind `work` must end with us.
        await _cancel(working)
        await _cancel(watching)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # seen, so that asyncio does not report it a second time

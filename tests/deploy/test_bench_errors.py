"""What goes wrong is counted by its kind, and ends nothing else."""

from __future__ import annotations

import asyncio

from cluster.workloads import OpenLoop
from deploy.bench import Target, drive, figures
from tests.deploy.bench_server import Body, Reply, fake, plan


async def misbehave(body: Body, reply: Reply) -> None:
    """As the prompt says."""
    how = body["prompt"]
    if how == "429":
        await reply.json(429, {"error": {"message": "too many", "code": "queue_full"}})
    elif how == "503":
        await reply.json(503, {"error": {"message": "not now", "code": "engine_unavailable"}})
    elif how == "500":
        await reply.json(500, b"<html>oh</html>")
    elif how == "closed":
        reply.reset()
    else:
        await reply.open()
        await reply.event({"choices": [{"text": "a", "token_ids": [1]}]})
        if how == "event":
            await reply.event({"error": {"message": "worker died", "code": "worker_lost"}})
        elif how == "reset":
            await asyncio.sleep(0.02)  # so that the token is not lost with the connection
            reply.reset()
        elif how == "garbage":
            await reply.raw(b"data: {nonsense\n\n")
        elif how == "silent":
            await asyncio.Event().wait()
        elif how == "fine":
            await reply.done()


async def test_errors_are_counted_by_kind_and_end_nothing() -> None:
    expected = {
        "429": "429", "503": "503 engine_unavailable", "500": "500", "closed": "connection", "reset": "cut short",
        "cut": "cut short", "event": "stream error worker_lost", "garbage": "malformed event", "silent": "timeout",
        "fine": None,
    }  # fmt: skip
    async with fake(misbehave) as server:
        target = Target(server.url, timeout_s=2.0)
        run = await drive(target, OpenLoop([plan(how, 0.001 * place) for place, how in enumerate(expected)]))
    assert [record.error for record in run.requests] == list(expected.values())
    found = figures(run)
    assert (found.finished, found.failed) == (1, 9)
    assert found.errors["cut short"] == 2
    assert sum(found.errors.values()) == 9
    assert len(server.bodies) == len(expected)  # nothing was sent twice
    assert all(record.message for record in run.requests if record.error)


async def test_an_answer_without_a_token_is_an_error() -> None:
    async def nothing(body: Body, reply: Reply) -> None:
        await reply.open()
        await reply.done()

    async with fake(nothing) as server:
        run = await drive(Target(server.url), OpenLoop([plan()]))
    assert run.requests[0].error == "no tokens"
    assert "no token came" in figures(run).warnings

"""The load test's client sends what is due when it is due, whatever the server does."""

from __future__ import annotations

import asyncio

from cluster.workloads import ClosedLoop, Interference, OpenLoop, PlannedRequest, RandomPrompt
from deploy.bench import Target, drive, figures
from deploy.bench.record import Outcome
from tests.deploy.bench_server import Body, Reply, fake, plan, speak


async def test_a_server_that_does_not_answer_delays_no_request() -> None:
    """Nothing is answered before all requests have come; a client that waited would wait for ever."""
    everybody, count = asyncio.Event(), 40

    async def after_all(body: Body, reply: Reply) -> None:
        if len(server.bodies) == count:
            everybody.set()
        await everybody.wait()
        await speak(body, reply)

    async with fake(after_all) as server:
        run = await drive(Target(server.url), OpenLoop([plan(at_s=0.005 * number) for number in range(count)]))
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED] * count
    assert all(record.sent_s >= record.due_s for record in run.requests)
    last_sent = max(record.sent_s for record in run.requests)
    assert all(record.tokens[0] > last_sent for record in run.requests)
    assert figures(run).lateness.n == count


async def test_requests_are_sent_in_the_order_in_which_they_are_due() -> None:
    async with fake() as server:
        plans = [plan("late", 0.05), plan("early", 0.0), plan("between", 0.025)]
        run = await drive(Target(server.url), OpenLoop(plans))
    assert [body["prompt"] for body in server.bodies] == ["early", "between", "late"]
    assert [record.due_s for record in run.requests] == [0.0, 0.025, 0.05]


async def test_a_closed_loop_has_never_more_and_never_fewer_under_way() -> None:
    """The server answers only when as many wait as should be."""
    waiting: list[asyncio.Event] = []
    most = 0

    async def when_three_wait(body: Body, reply: Reply) -> None:
        nonlocal most
        mine = asyncio.Event()
        waiting.append(mine)
        most = max(most, len(waiting))
        last = len(server.bodies) == 9
        for event in waiting[:] if last else waiting[: len(waiting) - 2]:
            event.set()
            waiting.remove(event)
        await mine.wait()
        await speak(body, reply)

    async with fake(when_three_wait) as server:
        run = await drive(Target(server.url), ClosedLoop([plan() for _ in range(9)], 3))
    assert most == 3
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED] * 9
    assert figures(run).lateness.n == 0


async def test_the_long_prompt_comes_after_the_lead_and_the_streams_outlast_it() -> None:
    sent = {"stream": 0}

    async def endless(body: Body, reply: Reply) -> None:
        if body["prompt"] == "long":
            assert sent["stream"] >= 2 * 4
            await speak(body, reply)
            return
        await reply.open()
        for token in range(body["max_tokens"]):
            await reply.event({"choices": [{"text": "a", "token_ids": [token]}]})
            sent["stream"] += 1
            await asyncio.sleep(0.002)
        await reply.done()

    streams = [PlannedRequest("stream", 100_000, kind="stream") for _ in range(2)]
    workload = Interference(streams, PlannedRequest("long", 3, kind="long"), lead=4, tail=5)
    async with fake(endless) as server:
        run = await drive(Target(server.url), workload)
    found = figures(run)
    assert found.errors == {}
    assert found.intrusion is not None
    assert found.intrusion.running == 2
    assert found.intrusion.before.n >= 2 * 3
    assert all(record.left for record in run.requests if record.kind == "stream")


async def test_streams_that_end_early_hold_nobody_up() -> None:
    streams = [PlannedRequest("stream", 3, kind="stream") for _ in range(2)]
    async with fake() as server:
        run = await drive(Target(server.url), Interference(streams, PlannedRequest("long", 3, kind="long")))
    found = figures(run)
    assert found.finished == 3
    assert "2 of 2 streams had ended before" in " ".join(found.warnings)


async def test_warm_up_is_sent_and_not_recorded() -> None:
    plans = [PlannedRequest(RandomPrompt(8, f"own/{number}"), 4) for number in range(2)]
    async with fake() as server:
        run = await drive(Target(server.url), OpenLoop(plans), warmup=3)
    assert len(server.bodies) == 3 + 2
    assert len(run.requests) == 2
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 5  # nothing that a prefix cache could have learnt


async def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    stop = asyncio.Event()

    async def then_stop(body: Body, reply: Reply) -> None:
        if len(server.bodies) == 1:
            await speak(body, reply)
            return
        await reply.open()
        await reply.event({"choices": [{"text": "a", "token_ids": [1]}]})
        stop.set()
        await asyncio.Event().wait()

    async with fake(then_stop) as server:
        workload = ClosedLoop([plan() for _ in range(5)], 1)
        run = await drive(Target(server.url), workload, stop=stop)
    assert run.interrupted
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED, Outcome.UNFINISHED]
    assert "2 of 5 requests had been sent" in " ".join(figures(run).warnings)


async def test_extra_fields_and_the_key_are_sent() -> None:
    slo = {"ttft_ms": 100.0}
    target_extra = {"slo": {"ttft_ms": 1.0}, "top_p": 0.5}
    async with fake() as server:
        target = Target(server.url, model="mine", api_key="secret", extra=target_extra)
        await drive(target, OpenLoop([PlannedRequest([1, 2], 3, extra={"slo": slo})]))
    body = server.bodies[0]
    assert (body["slo"], body["top_p"], body["model"], body["prompt"]) == (slo, 0.5, "mine", [1, 2])
    assert server.headers[0]["authorization"] == "Bearer secret"

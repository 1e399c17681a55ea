"""A server in this process that speaks the services' APIs, from their public descriptions, and fails on demand."""

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "judge-1"
DRIP_S = 0.05
HUGE = 2**30


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Stub:
    """``faults`` befall the next scoring requests, one each; the last one stays where ``lasting``."""

    faults: list[str] = field(default_factory=list)
    lasting: bool = False
    value: str = "7"
    """The JSON of every score: 7 of 10 for judges, 0.7 for the others."""
    content: Callable[[dict[str, Any]], str] | None = None
    """What a judge says, of the request's body."""
    seconds: float = 0.0
    window: int | None = None
    unknown: frozenset[str] = frozenset()
    """Fields that requests may not have."""
    elsewhere: str = "http://127.0.0.1:9"
    asked: list[Asked] = field(default_factory=list)
    """Requests for scores."""
    others: list[Asked] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    sent: int = 0
    """Bytes of the longest reply."""

    def __enter__(self) -> "Stub":
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self.server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._do(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while asked := await self._read(reader):
                scoring = asked.method == "POST" and asked.path != "/api/show"
                (self.asked if scoring else self.others).append(asked)
                fault = self._fault() if scoring else ""
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    if self.seconds:
                        await asyncio.sleep(self.seconds)
                    if await self._answer(writer, asked, fault):
                        break
                finally:
                    self.in_flight -= 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _fault(self) -> str:
        if not self.faults:
            return ""
        return self.faults[0] if self.lasting and len(self.faults) == 1 else self.faults.pop(0)

    async def _read(self, reader: asyncio.StreamReader) -> Asked | None:
        line = (await reader.readline()).decode()
        if not line:
            return None
        method, path, _ = line.split()
        headers = {}
        while (header := (await reader.readline()).decode().strip()) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Asked(method, path.rstrip("/"), headers, json.loads(body) if body else None)

    async def _answer(self, writer: asyncio.StreamWriter, asked: Asked, fault: str) -> bool:
        """True where the connection ends with it."""
        if fault.isdigit():
            key = asked.headers.get("authorization", "").removeprefix("Bearer ")
            body = json.dumps({"error": {"message": f"no: {key}"}}).encode()
            return self._write(writer, int(fault), body, {"Retry-After": "7"} if fault == "429" else {})
        match fault:
            case "hang":
                await asyncio.sleep(60)
            case "drip":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                for _ in range(1000):
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(DRIP_S)
            case "huge":
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {HUGE}\r\n\r\n".encode())
                for self.sent in range(0, HUGE, 2**16):
                    writer.write(b" " * 2**16)
                    await writer.drain()
            case "gzip":
                return self._write(writer, 200, gzip.compress(b" " * 2**20), {"Content-Encoding": "gzip"})
            case "redirect":
                return self._write(writer, 307, b"", {"Location": f"{self.elsewhere}{asked.path}"})
            case "html":
                return self._write(writer, 200, b"<html><body>Sign in</body></html>", {"Content-Type": "text/html"})
            case "cut off":  # the connection ends within the body
                writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"a"')
                return True
        status, reply = self._reply(asked, fault)
        told = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        return self._write(writer, status, told[:-2] if fault == "truncated" else told, {})

    def _write(self, writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str]) -> bool:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
        if not any(name == "Content-Type" for name in headers):
            lines.append("Content-Type: application/json")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return False

    def _reply(self, asked: Asked, fault: str) -> tuple[int, Any]:
        body = asked.body or {}
        if unknown := self.unknown & body.keys():
            return 400, {"error": {"message": f"Unsupported parameter: {sorted(unknown)[0]!r}"}}
        said = self.content(body) if self.content else None
        match asked.path:
            case "/v1/models":
                return 200, {"data": [{"id": MODEL} | ({"max_model_len": self.window} if self.window else {})]}
            case "/v1/chat/completions" | "/compatible-mode/v1/chat/completions":
                choice = {"index": 0, "message": {"role": "assistant", "content": said or self._verdict(fault)}}
                choices = [] if fault == "fewer" else [choice | {"finish_reason": "stop"}]
                return 200, {"id": "c1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": choices}
            case "/api/show":
                if body["model"] != MODEL:
                    return 404, {"error": f"model '{body['model']}' not found"}
                info = {"general.architecture": "llama"}
                return 200, {"model_info": info | ({"llama.context_length": self.window} if self.window else {})}
            case "/api/chat":
                message = {} if fault == "fewer" else {"role": "assistant", "content": said or self._verdict(fault)}
                done = {"done": True, "done_reason": "stop", "prompt_eval_count": 9, "eval_count": 4}
                return 200, {"model": MODEL, "created_at": "2026-01-01T00:00:00Z", "message": message} | done
            case "/api/v1/services/rerank/text-rerank/text-rerank":
                names = list(range(len(body["input"]["documents"])))
                return 200, self._listed(names, fault, ("index", "relevance_score"), ("output", "results"))
            case "/score":
                names = [item["id"] for item in body["items"]]
                return 200, self._listed(names, fault, ("id", "score"), ("scores",))
        return 404, {"error": "no such path"}

    def _verdict(self, fault: str) -> str:
        return {
            "more": '{"score": 7, "score": 9}',
            "prose": 'The score is {"score": 7}',
            "another key": '{"score": 7, "note": 1}',
        }.get(fault, f'{{"score": {self.value}}}')

    def _listed(self, names: list[Any], fault: str, keys: tuple[str, str], path: tuple[str, ...]) -> str:
        """Each score is a hundredth more than the one before, so that an exchange shows."""
        scores = [self.value] * len(names)
        if self.value == "0.7":
            scores = [f"{0.7 + place / 100:.2f}" for place in range(len(names))]
        entries = [f'{{"{keys[0]}": {json.dumps(n)}, "{keys[1]}": {s}}}' for n, s in zip(names, scores, strict=True)]
        match fault:
            case "fewer":
                entries.pop()
            case "more":
                entries.append(entries[0])
            case "another id":
                entries[0] = entries[0].replace(json.dumps(names[0]), '"nobody"', 1)
            case "reordered":
                entries.reverse()
        told = f"[{', '.join(entries)}]"
        for name in reversed(path):
            told = f'{{"{name}": {told}}}'
        return told

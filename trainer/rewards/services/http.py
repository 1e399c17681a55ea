"""JSON over HTTP to one service: within a time, to one address, and no further."""

import asyncio
import email.utils
import functools
import json
import os
import random
import ssl
import time
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2
import tenacity

from trainer.errors import Refused, Stopped, redacted
from trainer.outside import NotJson
from trainer.rewards.services.breaker import ServiceError, Unavailable
from trainer.rewards.services.replies import parsed

LARGEST_REPLY = 4 * 2**20
"""Bytes. Replies are a few hundred; what a server says of a model is tens of thousands."""
SHORTEST_KEY = 8
"""Characters. A shorter one ("EMPTY", as local servers want) may be a word or a number of any reply."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
AGAIN = frozenset({408, 409, 429, *range(500, 600)})
HOPELESS = frozenset({401, 402, 403, 404, 405, 413, 422})
"""Every further call would be answered alike, and perhaps be paid for."""
_random = random.Random()  # of its own: the global one belongs to the run, and its state to the checkpoint


class Again(Unavailable):
    """A failure that may pass. ``after``: seconds that the server asked to wait, if it did."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class Rejected(Exception):
    """The server does not take this request (400, 422); perhaps without a field that it names in ``body``. ``final``:
    what it means otherwise."""

    def __init__(self, final: ServiceError | Stopped, body: str) -> None:
        super().__init__(str(final))
        self.final, self.body = final, body


class Http:
    """``post`` and ``get`` of one service. ServiceError where there is no answer to use, Stopped where there cannot be
    one.

    The key is read from the environment as a request is made and goes to this address alone: redirects are not
    followed, proxies of the environment are not used, certificates are verified.
    """

    def __init__(self, label: str, url: str, key_env: str, *, timeout: float, retries: int) -> None:
        self.label, self.url, self.key_env = label, url, key_env
        self.timeout, self.retries = timeout, retries
        self._client: httpx2.AsyncClient | None = None
        try:
            httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise Refused(f"{label}: url = {url}: {error}. Expected http://HOST:PORT or https://HOST.") from None
        self._key()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return await self.offer(path, body)
        except Rejected as rejected:
            raise rejected.final from None

    async def offer(self, path: str, body: dict[str, Any]) -> Any:
        """``post``, for those who have another form of the request where this one is Rejected."""
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> Any:
        try:
            return await self._ask("GET", path, None)
        except Rejected as rejected:
            raise rejected.final from None

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON of a reply, of one try of several; all tries and the pauses between them end within ``timeout``."""
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(Again),
            stop=tenacity.stop_after_attempt(1 + self.retries) | tenacity.stop_before_delay(self.timeout),
            wait=_pause,
            sleep=asyncio.sleep,
            reraise=True,
        )
        try:
            async with asyncio.timeout(self.timeout):
                return await tries(self._try, method, path, body)
        except TimeoutError:
            raise Unavailable(f"{self.url}{path}: no whole answer within {self.timeout:g} s") from None

    async def _try(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        url = self.url + path
        content = None if body is None else json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "replace")
        try:
            async with self._open().stream(method, url, content=content, headers=self._headers()) as reply:
                told = self._without_key(await self._read(reply, url))
        except httpx2.TransportError as error:
            raise Again(f"{url}: {_reason(error)}") from None
        except httpx2.HTTPError as error:
            raise Unavailable(f"{url}: {_reason(error)}") from None
        if reply.status_code != HTTPStatus.OK:
            self._refused(reply, told, url)
        try:
            return parsed(told)
        except NotJson as error:
            raise Unavailable(f"{url}: the reply is no JSON ({error}): {self._quoted(told)}") from None

    def _open(self) -> httpx2.AsyncClient:
        """Made at the first call, since it belongs to the event loop that it is used in."""
        if self._client is None:
            self._client = httpx2.AsyncClient(
                trust_env=False,
                verify=_tls(),
                follow_redirects=False,
                timeout=httpx2.Timeout(None, connect=max(1.0, self.timeout / 3)),  # time for a second try
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # what is not compressed cannot unfold to gigabytes
            "User-Agent": "zero-grpo",
        }
        return headers | ({"Authorization": f"Bearer {self._key()}"} if self.key_env else {})

    def _key(self) -> str:
        """Refused, without repeating it, where there is none or one that no header can hold."""
        if not self.key_env:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise Refused(f"the environment variable {self.key_env} is not set; it holds the key of {self.url}")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise Refused(f"the environment variable {self.key_env} holds spaces or other characters that no key has")
        return key

    async def _read(self, reply: httpx2.Response, url: str) -> bytes:
        if (coding := reply.headers.get("Content-Encoding", "identity")) != "identity":
            raise Unavailable(f"{url}: the reply is compressed ({coding:.20}), which was not asked for")
        told = bytearray()
        async for chunk in reply.aiter_raw():
            told += chunk
            if len(told) > LARGEST_REPLY:
                raise Unavailable(f"{url}: the reply is longer than {LARGEST_REPLY // 2**20} MiB")
        return bytes(told)

    def _refused(self, reply: httpx2.Response, told: bytes, url: str) -> None:
        """Raises what an answer other than 200 means."""
        status = reply.status_code
        answered = f"{url} answered {status} {_phrase(status)}"
        if status in AGAIN:
            after = _retry_after(reply.headers.get("Retry-After", ""))
            asks = "" if after is None else f", and asks to wait {after:.0f} s"
            raise Again(f"{answered}{asks}: {self._quoted(told)}", after)
        if status in (400, 422):
            final = self._hopeless(status, answered, self._quoted(told)) if status == 422 else None
            row_fails = ServiceError(f"{answered}: {self._quoted(told)}")
            raise Rejected(final or row_fails, told[:20_000].decode("utf-8", "replace"))
        if status in HOPELESS:
            raise self._hopeless(status, answered, self._quoted(told))
        if 300 <= status < 400:
            raise Unavailable(f"{answered}, a redirect to {_host(reply)!r:.80}, which is not followed")
        raise ServiceError(f"{answered}: {self._quoted(told)}")

    def _hopeless(self, status: int, answered: str, body: str) -> Stopped:
        """Of a key that is not taken, the reply is not repeated: some quote it."""
        if status in (401, 403):
            named = f"the key in the environment variable {self.key_env} is not accepted"
            advice = f"{named if self.key_env else 'it wants a key, and none is named'}. Not tried again."
        elif status == 404:
            advice = f"there is no such path, or no such model there. {body}"
        else:
            advice = f"no further call would do better. {body}"
        return Stopped(f"{self.label}: {answered}: {advice}")

    def _without_key(self, told: bytes) -> bytes:
        """A reply, whatever its status, may quote the key, and what is read of it stands in messages: cut, too."""
        key = os.environ.get(self.key_env, "").strip() if self.key_env else ""
        if len(key) < SHORTEST_KEY:
            return told
        for form in (key, key.replace("/", r"\/")):  # as some servers write JSON
            told = told.replace(form.encode(), b"[key]")
        return told

    def _quoted(self, told: bytes) -> str:
        """The beginning of a reply, safe to print, without the key."""
        text = told[:20_000].decode("utf-8", "replace")
        if key := os.environ.get(self.key_env, "").strip():
            text = text.replace(key, "[key]")
        return f"{redacted(text)!r:.200}" if text else "an empty reply"


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context(trust_env=False)  # a file of certificates to read; once is enough


def _reason(error: httpx2.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _host(reply: httpx2.Response) -> str:
    try:
        return urlsplit(reply.headers.get("Location", "")).hostname or "another path"
    except ValueError:
        return "no address"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "(no status of HTTP)"


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds until the next try: what the server asked for, else exponential; a random part keeps calls apart."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.after if isinstance(error, Again) else None
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (state.attempt_number - 1))
    if asked is not None:
        return asked + _random.uniform(0, FIRST_PAUSE_S)
    return _random.uniform(longest / 2, longest)


def _retry_after(header: str) -> float | None:
    """Seconds from a Retry-After header, in either of its forms; None where it says nothing."""
    header = header.strip()
    if header.isascii() and header.isdigit() and len(header) < 10:
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None

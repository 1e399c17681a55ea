"""Rules about the [[reward]] tables that name a service: where it is, and its key."""

import ipaddress
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from trainer.config.fields import literal
from trainer.config.grpo import Reward
from trainer.config.problems import Problem
from trainer.config.schema import RunConfig


def address(config: RunConfig) -> Iterator[Problem]:
    for index, entry in enumerate(config.reward):
        if entry.url and (wrong := _wrong_address(entry)):
            yield Problem((("reward", index, "url"),), f"reward.{entry.name}.url = {_shown(entry.url)}: {wrong}")


def _shown(url: str) -> str:
    """Scheme and host: what stands before an @ or after the host may be a key."""
    return literal(re.sub(r"^([^/?#]*://)?([^/]*@)?([^/?#]*).*$", r"\1\3", url, flags=re.DOTALL))


def _wrong_address(entry: Reward) -> str:
    try:
        parts = urlsplit(entry.url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{error}. Expected http://HOST:PORT or https://HOST, with the path that the server has."
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        return "expected http://HOST:PORT or https://HOST, with the path that the server has."
    if parts.query or parts.fragment or any(char.isspace() for char in entry.url):
        return "expected an address without spaces, ? and #."
    if parts.scheme == "http" and entry.key_env and not is_loopback(host):
        return (
            f"the key in {entry.key_env} would cross the network in the clear. Use https, a tunnel that ends at"
            " localhost, or a server without a key."
        )
    return ""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def key_is_named(config: RunConfig) -> Iterator[Problem]:
    for index, entry in enumerate(config.reward):
        paid = entry.kind in ("dashscope", "dashcope") or (entry.kind == "openai" and not entry.url)
        if paid and not entry.key_env:
            example = "OPENAI_API_KEY" if entry.kind == "openai" else "DASHSCOPE_API_KEY"
            other = " Another server of that API is named by its url." if entry.kind == "openai" else ""
            yield Problem(
                (("reward", index, "key_env"), ("reward", index, "kind")),
                f'reward.{entry.name}.kind = "{entry.kind}" needs the environment variable that holds its key:'
                f' reward.{entry.name}.key_env = "{example}".{other}',
            )


RULES = (address, key_is_named)

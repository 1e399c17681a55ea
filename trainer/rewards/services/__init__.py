"""Rewards that a service answers: judges (OpenAI-compatible, DashScope, Ollama), a reranker, a server of yours."""

"""Exposes. Ray Serve application, OpenAI-compatible API, command line, demo."""

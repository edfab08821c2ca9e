"""The OpenAI-compatible API over any engine. Knows HTTP and text; what is computed where is the engine's business."""

from deploy.api.app import create_api
from deploy.api.settings import ApiSettings

__all__ = ["ApiSettings", "create_api"]

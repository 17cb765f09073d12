"""The commands: thin skins over fliptrace.pair that turn options into calls and errors into exit codes."""

from __future__ import annotations

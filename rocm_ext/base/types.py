"""Types of objects whose keys no type fixes: they come from YAML files, datasets, servers and files of JSON."""

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]  # a YAML file, or a block of one: its keys and their values
Row = Mapping[str, Any]  # a dataset's row: its columns and their values
# a message of a conversation in OpenAI's form: role, content, tool_calls, …
Message = dict[str, Any]
Json = dict[str, Any]  # a JSON object

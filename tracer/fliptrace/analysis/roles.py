"""What a LoRA site does in its layer, read from its module's name.

Names are those of the common decoder families. A name that is none of them has the role OTHER and is taken in execution
order; nothing is guessed from shapes.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache

from fliptrace.sites import Site


class Role(StrEnum):
    """What a projection makes."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_IN = "query, key and value"
    ATTENTION_OUT = "attention output"
    MLP_IN = "MLP input"
    MLP_OUT = "MLP output"
    OTHER = "other"


_ROLES = {
    Role.QUERY: "q_proj query q wq q_lin to_q",
    Role.KEY: "k_proj key k wk k_lin to_k",
    Role.VALUE: "v_proj value v wv v_lin to_v",
    Role.ATTENTION_IN: "qkv_proj query_key_value qkv c_attn Wqkv wqkv W_pack attn_qkv in_proj kv_proj",
    Role.ATTENTION_OUT: "o_proj out_proj wo o_lin to_out out_lin",
    Role.MLP_IN: "gate_proj up_proj gate_up_proj fc1 fc_in c_fc dense_h_to_4h w1 w3 linear_fc1 wi wi_0 wi_1 lin1 "
    "gate up",
    Role.MLP_OUT: "down_proj fc2 fc_out dense_4h_to_h w2 linear_fc2 lin2 down",
}
_BY_NAME = {name: role for role, names in _ROLES.items() for name in names.split()}
#: Names that attention and MLP share; the module's parent tells which it is.
_SHARED = frozenset({"c_proj", "dense", "proj", "wo"})
_ATTENTION = re.compile(r"(?:^|[._])(?:self_)?att(?:n|ention)", re.IGNORECASE)


@cache
def role_of(site: Site) -> Role:
    """Return what a site's projection makes."""
    name = re.split(r"[\[#]", site.module)[0]
    parent, _, last = name.rpartition(".")
    if site.slice:
        sliced = _BY_NAME.get(site.slice)
        if sliced:
            return sliced
    if last in _SHARED and parent:
        return Role.ATTENTION_OUT if _ATTENTION.search(parent) else Role.MLP_OUT
    return _BY_NAME.get(last, Role.OTHER)

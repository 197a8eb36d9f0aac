"""All schedule templates, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from workers.search.templates.conv import ConvTemplate
from workers.search.templates.copy import CopyTemplate
from workers.search.templates.generic import GenericTemplate
from workers.search.templates.integer import IntegerTemplate
from workers.search.templates.knobs import Cpu, Template
from workers.search.templates.rowwise import RowwiseTemplate
from workers.search.templates.window import WindowTemplate
from workers.search.templates.winograd import WinogradTemplate

TEMPLATES: Final[Mapping[str, Template[Cpu]]] = {
    template.name: template
    for template in (
        ConvTemplate(),
        CopyTemplate(),
        GenericTemplate(),
        IntegerTemplate(),
        RowwiseTemplate(),
        WindowTemplate(),
        WinogradTemplate(),
    )
}

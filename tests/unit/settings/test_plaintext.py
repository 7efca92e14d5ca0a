"""Permission to send the token in plaintext to other machines."""

from __future__ import annotations

import pytest

from psdist.errors import ConfigurationError
from psdist.settings.config import client_settings
from psdist.settings.programs import server_settings


def test_plaintext_to_other_machines_is_switched_on_by_a_flag_or_a_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = {"PSDIST_TOKEN": "t", "PSDIST_SCHEDULER": "h:1"}
    with pytest.raises(SystemExit) as ended:
        server_settings([], elsewhere)
    assert ended.value.code == 2 and "the token would be sent to h:1" in capsys.readouterr().err
    assert server_settings(["--insecure"], elsewhere).credentials.insecure
    assert not client_settings(elsewhere).credentials.insecure
    assert client_settings(elsewhere | {"PSDIST_INSECURE": "1"}).credentials.insecure
    with pytest.raises(ConfigurationError, match="PSDIST_INSECURE: 'perhaps' is neither 1 nor 0"):
        client_settings(elsewhere | {"PSDIST_INSECURE": "perhaps"})

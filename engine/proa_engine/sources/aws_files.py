"""What `aws configure` writes, which obstore does not read: a profile's keys, region and endpoint.

The files, the names of the variables and the order are boto3's: a variable comes before the files, and the files before
an identity of the container or machine.
"""

import os
from collections.abc import Mapping
from configparser import Error, RawConfigParser
from pathlib import Path

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
# Ways to get keys that need Amazon's own code, by the fields of a profile.
_OTHER_KEYS = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


def read_profile(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the profile AWS_PROFILE, or of `default`; the file of credentials comes first.

    Raises ValueError for a file that cannot be read, and for a profile that is set and is in no file.
    """
    wanted = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    name = wanted or "default"
    config = _read(environment.get("AWS_CONFIG_FILE") or "~/.aws/config")
    credentials = _read(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials")
    found = [
        parser[section]
        for parser, sections in ((config, (name, f"profile {name}", f'profile "{name}"')), (credentials, (name,)))
        for section in sections
        if parser.has_section(section)
    ]
    if wanted and not found:
        raise ValueError(f"AWS_PROFILE is {wanted}, but there is no such profile in the files of `aws configure`")
    return {field: value for section in found for field, value in section.items()}


def store_options(environment: Mapping[str, str], profile: Mapping[str, str]) -> dict[str, str]:
    """Return the options of obstore's store that the variables leave to the profile. Raises ValueError if its keys are
    needed, and are to be had in a way that is not supported."""
    options = {}
    if not any(environment.get(each) for each in ("AWS_REGION", "AWS_DEFAULT_REGION")) and "region" in profile:
        options["region"] = profile["region"]
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if not any(environment.get(each) for each in names) and "endpoint_url" in profile:
        options["endpoint"] = profile["endpoint_url"]
    is_public = environment.get("AWS_SKIP_SIGNATURE", "").lower() == "true"
    if is_public or any(environment.get(each) for each in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")):
        return options
    if other := next((each for each in _OTHER_KEYS if each in profile), None):
        raise ValueError(
            f"the profile has {other}, which is not supported: set the variables that `aws configure "
            "export-credentials --format env` prints"
        )
    return options | {option: profile[field] for field, option in _KEYS.items() if field in profile}


def read_authorities(environment: Mapping[str, str], profile: Mapping[str, str]) -> bytes | None:
    """Return the certificates of AWS_CA_BUNDLE, or of the profile's `ca_bundle`. Raises ValueError."""
    path = environment.get("AWS_CA_BUNDLE") or profile.get("ca_bundle")
    if not path:
        return None
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} (AWS_CA_BUNDLE) cannot be read: {error.strerror or error}") from error


def _read(path: str) -> RawConfigParser:
    """An empty one if there is no file, or in a folder that may not be read, such as another user's home."""
    parser, expanded = RawConfigParser(), os.path.expanduser(path)
    if not os.path.isfile(expanded):
        return parser
    try:
        parser.read_string(Path(expanded).read_text(), source=path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (Error, UnicodeError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error
    return parser

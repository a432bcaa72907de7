#!/bin/sh
# Installs Debian's Chromium, in which the tests look at reports, where that is allowed; says so where it is not.
set -u
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    as_root="sudo -n"
fi
if command -v apt-get >/dev/null && $as_root true 2>/dev/null; then
    echo "installing chromium, chromium-driver and fonts-dejavu-core for the tests of reports" >&2
    export DEBIAN_FRONTEND=noninteractive
    $as_root apt-get update -qq &&
        $as_root apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null &&
        exit 0
fi
cat >&2 <<'END'
WARNING: there is no chromium with chromedriver, and it cannot be installed from here: the tests that look at reports in a
browser will not run. As root: apt-get install chromium chromium-driver fonts-dejavu-core
END

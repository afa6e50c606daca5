"""Settings of the tests of single implementations."""

from parity.session import configure

configure()

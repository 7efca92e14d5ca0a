"""Generated from ``proto/psdist/v1`` by ``make proto``; not edited by hand."""

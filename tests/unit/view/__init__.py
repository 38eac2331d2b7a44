"""Modules of views may be called as parts of the library are: their tests stand in a package, so that both can be collected."""

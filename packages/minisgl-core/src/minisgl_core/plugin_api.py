"""The version of the contracts between minisgl and its plugins.

The major number grows when a plugin written for the old contracts may stop working: a method removed, a new abstract
method, an argument or a promise changed. The minor number grows when something is added that a plugin may use or not: an
optional method, a new hook, a new field with a default. A provider declares the versions it works with as a class
attribute, ``plugin_api = ">=1,<2"`` (a hook module as a module attribute), and is refused by name elsewhere; the base
classes of the contracts carry a default for authors who do not think of it. The packages' own versions move on their own.

Nothing is released yet: 1.0 will be the contracts of the first release, and they may change until then.
"""

VERSION = "1.0"

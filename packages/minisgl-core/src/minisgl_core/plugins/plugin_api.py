"""The version of the contracts between minisgl and its plugins.

The major number grows when a plugin for the old contracts may stop working. Examples are a removed method, a new abstract method
and a changed argument. The minor number grows with additions that a plugin may ignore, such as an optional method, a new hook or
a field with a default.

A provider declares its versions as a class attribute, ``plugin_api = ">=2,<3"``, and a hook module as a module attribute. Other
versions of minisgl refuse the provider with an error that names it. The base classes of the contracts have a default for
providers without a declaration. The versions of the packages are independent of this one.

Version 1 was never released. The first release will have version 2.0, which may change until then.
"""

VERSION = "2.0"

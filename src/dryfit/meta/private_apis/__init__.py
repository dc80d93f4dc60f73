"""The only modules that touch private names of torch, transformers and accelerate, with ``dryfit.gpu.private_apis``.

One module for each thing that dryfit does with a library; the library's name comes first. Each has ``NAMES``, where a
comment above a name, or above several of one purpose, has the reason and the condition for their removal ("until";
none where a name is answered in a device's place: as long as there is a virtual GPU), the names under public ones of
ours, and a :class:`~dryfit.settings.private_names.PrivateNames` with the self-test that a feature asks for where it
begins. Nothing of another library is imported here that its users would not import anyway.
"""

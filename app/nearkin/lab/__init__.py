"""Measuring, next to peers. Invariant: what is compared ran in the same run, on the same core, over the same bytes.

    kernels_room   single functions: chunkers, hashes, features, delta codecs; by OpenSSL's SHA-1
    pairs_room     delta codecs over pairs of similar chunks, and how well each feature algorithm finds them
    store_room     whole stores: versions in, versions out, bytes kept

Each room returns a `record.Record`; `report` writes it as Markdown and JSON, `chart` draws it. `nearkin bench` is the
way in. Nothing here is imported by the rest of Nearkin, and matplotlib only where a chart is drawn.
"""

"""Measure Nearkin and its peers.

    kernels_suite   single functions: chunkers, hashes, features, delta codecs; relative to OpenSSL's SHA-1
    pairs_suite     delta codecs over pairs of similar chunks, and how well each feature algorithm finds them
    store_suite     whole stores: versions in, versions out, bytes kept

Each suite returns a record; `report` writes it as Markdown and JSON, `report_charts` draws it. `nearkin bench` runs
them. No other part of Nearkin imports this package, and matplotlib is imported only to draw a chart.

Invariant: compared figures were measured in the same run, on the same core, over the same bytes.
"""

// Runs a task of a kernel over several devices. Each other device must have the words, packets and logits that this one has, at the same places.
#pragma once

template <class M, class Own, class All, class Run>
static void run_with_peers(const Own& params, All& with_peers, const std::vector<u64>& exchange, Run run) {
  constexpr int LOGITS = 4096;
  std::vector<u64> exchanges[peers<M>()];
  std::vector<float> own(LOGITS, std::nanf("")), logits[peers<M>()];
  static_cast<Own&>(with_peers) = params;
  if (params.logits) with_peers.logits = own.data();
  for (int i = 0; i < peers<M>(); i++) {
    exchanges[i] = exchange;
    logits[i] = own;
    with_peers.peers[i] = u64(exchanges[i].data()) - u64(exchange.data());
    with_peers.peer_logits[i] = u64(logits[i].data()) - u64(own.data());
  }
  const std::vector<u64> before = exchange;
  run();
  bool same = before != exchange;
  for (int i = 0; i < peers<M>(); i++) same = same && exchanges[i] == exchange && !std::memcmp(logits[i].data(), own.data(), LOGITS * sizeof(float));
  if (!same) std::printf("another device has other words, packets or logits\n"), std::exit(1);
  for (int i = 0; params.logits && i < LOGITS; i++)
    if (!std::isnan(own[i])) params.logits[i] = own[i];
}

mod basic;
mod chaos;
mod golden;
mod handshake;
mod net;

mod basic;
mod chaos;
mod golden;
mod handshake;
mod loss;
mod net;
mod window;
